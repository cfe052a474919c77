"""Checks of the kernels that quantise whole rows and groups, bit for bit against the reference on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.ops.formats import per_row, per_tensor, reference
from fusible.ops.formats.copies import Columns, Rows, Scaling
from fusible.ops.formats.formats import E4M3
from fusible.ops.kernels.hopper import quantize
from fusible.ops.kernels.problems.quantized import QuantizeRows, QuantizeWeight, RowWeight

from .quantize import (
    assert_same,
    assert_untouched,
    columns_copy,
    every_amax,
    poisoned,
    routed,
    rows_and_tail,
    run_rows,
    used_rows,
    values,
)

WHOLE = [Scaling.ROWS, Scaling.GROUPS]
WEIGHTS: list[dict[str, Any]] = [
    {"experts": 3, "n": 352, "k": 272},
    {"experts": 3, "n": 16, "k": 400, "separate": True, "transposed": False},
    {"experts": 2, "n": 144, "k": 272, "stored_transposed": True, "power_of_two": False},
    {"experts": 2, "n": 144, "k": 272, "stored_transposed": True, "transposed": False},
]


def rows_copy(tokens: int, features: int, device: str) -> Rows:
    return Rows(
        poisoned(tokens, features, device=device, dtype=torch.float8_e4m3fn),
        poisoned(tokens, device=device, dtype=torch.float32),
    )


def weight_copy(experts: int, n: int, k: int, transposed: bool, device: str) -> RowWeight:
    return RowWeight(
        poisoned(experts, n, k, device=device, dtype=torch.float8_e4m3fn),
        poisoned(experts, n, device=device, dtype=torch.float32),
        poisoned(experts, k, n, device=device, dtype=torch.float8_e4m3fn) if transposed else None,
        poisoned(experts, k, device=device, dtype=torch.float32) if transposed else None,
    )


def check_rows(
    device: str,
    sizes: Sequence[int],
    features: int,
    scaling: Scaling,
    dtype: torch.dtype = torch.bfloat16,
    *,
    power_of_two: bool = True,
    tail: int = 3,
    want: str = "rows and columns",
    index: torch.dtype = torch.int64,
    pitch: int = 0,
    encode: Tensor | None = None,
    x: Tensor | None = None,
) -> None:
    """Rows of the groups and of ``tail`` more, which are NaN and must be neither counted nor written."""
    buffer = rows_and_tail(sizes, features, dtype, tail, pitch, x)
    tokens, split_sizes = buffer.shape[0], torch.tensor(sizes, dtype=index)
    rows = rows_copy(tokens, features, device) if "rows" in want else None
    columns = columns_copy(tokens, len(sizes), features, device) if "columns" in want else None
    problem = QuantizeRows(buffer.to(device)[:, :features], split_sizes.to(device), power_of_two, rows, columns)
    problem.scaling, problem.encode = scaling, None if encode is None else encode.to(device)
    run_rows(problem)
    assert_copies(problem, buffer[:, :features], split_sizes, encode)


def assert_copies(problem: QuantizeRows, x: Tensor, split_sizes: Tensor, encode: Tensor | None = None) -> None:
    used = used_rows(split_sizes.tolist(), x.shape[0])
    if problem.rows is not None:
        data, scales, *_ = _expected_rows(problem, x, split_sizes, encode)
        assert scales is not None
        assert problem.rows.scales is not None
        assert_same(problem.rows.data[:used], data[:used], "bytes of rows")
        assert_same(problem.rows.scales[:used], scales[:used], "scales of rows")
        assert_untouched(problem.rows.data[used:], "bytes past the last group")
        assert_untouched(problem.rows.scales[used:], "scales past the last group")
    if problem.columns is not None:
        data, scales, *_ = _expected_columns(problem, x, split_sizes, encode)
        assert scales is not None
        _assert_columns(problem.columns, data, scales, reference.token_blocks(split_sizes, x.shape[0]))


def _of_groups(problem: QuantizeRows, x: Tensor, split_sizes: Tensor, encode: Tensor | None) -> Rows:
    return per_tensor.quantize_rows(x, split_sizes, problem.power_of_two, E4M3, encode)


def _expected_rows(problem: QuantizeRows, x: Tensor, split_sizes: Tensor, encode: Tensor | None) -> Rows:
    if problem.scaling is Scaling.ROWS:
        return per_row.quantize_rows(x, problem.power_of_two)
    data, scales, *_ = _of_groups(problem, x, split_sizes, encode)
    assert scales is not None
    last = scales.new_full((1,), math.nan)
    return Rows(data, torch.cat((scales, last))[reference.groups_of(split_sizes, x.shape[0])])


def _expected_columns(problem: QuantizeRows, x: Tensor, split_sizes: Tensor, encode: Tensor | None) -> Columns:
    """Scales of groups are [E], of rows [E, K]."""
    if problem.scaling is Scaling.ROWS:
        return per_row.quantize_columns(x, split_sizes, problem.power_of_two)
    rows = _of_groups(problem, x, split_sizes, encode)
    assert rows.scales is not None
    scales = rows.scales.unsqueeze(1).expand(-1, x.shape[1])
    return Columns(per_tensor.transposed_rows(rows, split_sizes), scales)


def _assert_columns(columns: Columns, data: Tensor, scales: Tensor, blocks: reference.TokenBlocks) -> None:
    used = int(blocks.valid.any(1).sum())
    assert_same(columns.data[:used], data[:used], "bytes of columns")
    assert_same(columns.scales[:used], scales[blocks.group[:used]], "scales of columns")
    assert_untouched(columns.data[used:], "blocks that no group uses")
    assert_untouched(columns.scales[used:], "scales of blocks that no group uses")


def check_every_amax(device: str, scaling: Scaling, dtype: torch.dtype, power_of_two: bool, part: slice) -> None:
    """As rows and as columns; of groups, one row each."""
    x = every_amax(dtype)[part]
    options = {"power_of_two": power_of_two, "tail": 0}
    sizes = [x.shape[0]] if scaling is Scaling.ROWS else [1] * x.shape[0]
    check_rows(device, sizes, x.shape[1], scaling, dtype, x=x, want="rows", **options)  # type: ignore[arg-type]
    if scaling is Scaling.ROWS:
        x = x.t().contiguous()
        check_rows(device, [x.shape[0]], x.shape[1], scaling, dtype, x=x, want="columns", **options)  # type: ignore[arg-type]


def check_earlier_scales(device: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Groups that are multiplied by what steps before have told: values saturate, and what is not finite is seen."""
    encode = torch.tensor([3.0, 1.0, 2.0**20, 0.3, 448.0, 7e-3])
    check_rows(device, [130, 0, 77, 1, 128, 40], 272, Scaling.GROUPS, dtype, encode=encode, power_of_two=False)


def check_gathered_rows(device: str, scaling: Scaling, tokens: int, top_k: int, features: int, want: str) -> None:
    """Rows that are read where their tokens lie are those of a gathered copy."""
    r, experts = routed(tokens, top_k, 5, features, torch.bfloat16, device), 5
    sizes, rows = r.tokens_per_expert[:-1], tokens * top_k
    by_row = rows_copy(rows, features, device) if "rows" in want else None
    by_column = columns_copy(rows, experts, features, device) if "columns" in want else None
    problem = QuantizeRows(r.x, sizes, True, by_row, by_column, r.slot_of_row, top_k, scaling)
    run_rows(problem)
    assert_copies(problem, r.x.cpu()[r.slot_of_row.cpu() // top_k], sizes.cpu())


def check_weight(
    device: str,
    experts: int,
    n: int,
    k: int,
    scaling: Scaling,
    dtype: torch.dtype = torch.bfloat16,
    *,
    power_of_two: bool = True,
    transposed: bool = True,
    separate: bool = False,
    stored_transposed: bool = False,
    encode: Tensor | None = None,
) -> None:
    weight = values(experts * n, k, dtype).view(experts, n, k)
    stored = weight.mT.contiguous().to(device).mT if stored_transposed else weight.to(device)
    matrices = [matrix.clone() for matrix in stored] if separate else stored
    out = weight_copy(experts, n, k, transposed, device)
    given = None if encode is None else encode.to(device)
    problem = QuantizeWeight(matrices, 1, power_of_two, out, scaling, given)
    assert quantize.refusal(problem) is None, quantize.refusal(problem)
    quantize.run(problem)
    expected = _expected_weight(weight, scaling, power_of_two, encode)
    for name, got, wanted in zip(out._fields, out, expected, strict=True):
        if got is not None and wanted is not None:
            assert_same(got, wanted, name)


def _expected_weight(weight: Tensor, scaling: Scaling, power_of_two: bool, encode: Tensor | None) -> RowWeight:
    if scaling is Scaling.ROWS:
        copies = weight, weight.mT.contiguous()
        data, transposed = (per_row.quantize_rows(copy, power_of_two) for copy in copies)
        return RowWeight(data.data, data.scales, transposed.data, transposed.scales)
    (_, n, k), (data, scales, *_) = weight.shape, per_tensor.quantize_weight(weight, power_of_two, encode=encode)
    by_group = scales.unsqueeze(1)
    return RowWeight(data, by_group.expand(-1, n), data.mT, by_group.expand(-1, k))
