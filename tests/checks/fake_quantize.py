"""Checks of the kernels that quantise and dequantise at once, bit for bit against the reference on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.ops.formats import mxfp8, nvfp4, reference
from fusible.ops.formats.nvfp4 import NV_BLOCK
from fusible.ops.formats.packed import PackedFormat
from fusible.ops.kernels.hopper import fake_quantize
from fusible.ops.kernels.problems.fake_quantized import FakeQuantizeRows, FakeQuantizeWeight, FakeQuantizing

from .quantize import assert_untouched, every_amax, poisoned, routed, rows_and_tail, used_rows, values

FORMATS = [PackedFormat.MXFP8, PackedFormat.NVFP4]
SIZES = [
    [300, 0, 77, 1, 32, 0, 33],
    [0, 0, 0],
    [1],
    [31],
    [0, 64, 16],
    [40, -9, 2**31 - 1, 5],  # lies: cut off where they are read
]
ROUNDINGS: list[dict[str, Any]] = [
    {"is_transformed": False, "seed": None},
    {"is_transformed": True, "seed": None},
    {"is_transformed": True, "seed": -(2**61) + 12345},
]
WEIGHTS: list[dict[str, Any]] = [
    {"experts": 3, "n": 80, "k": 336},
    {"experts": 2, "n": 32, "k": 64, "separate": True},
    {"experts": 70, "n": 16, "k": 16, "separate": True},
    {"experts": 2, "n": 72, "k": 272, "want": "rows"},
    {"experts": 2, "n": 144, "k": 80, "want": "columns"},
]


def new_values(*shape: int, device: str) -> Tensor:
    return poisoned(*shape, device=device, dtype=torch.bfloat16)


def spread(x: Tensor) -> Tensor:
    """Every other value smaller, by up to 2 ** 18: those that a scale of twice the size rounds otherwise."""
    factors = torch.randint(-18, 1, x.shape, generator=torch.Generator().manual_seed(x.numel())).float().exp2()
    factors[..., ::2] = 1
    return (x.float() * factors).to(x.dtype)


def assert_same_values(got: Tensor, expected: Tensor, what: str) -> None:
    """Bit for bit, zeros with their signs; a NaN is any NaN."""
    got, expected = got.cpu(), expected.cpu()
    assert torch.equal(got.isnan(), expected.isnan()), f"{what}: others are NaN"
    bits = [torch.where(t.isnan(), 0, t).contiguous().view(torch.int16) for t in (got, expected)]
    torch.testing.assert_close(*bits, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def check_rows(
    device: str,
    format: PackedFormat,
    sizes: Sequence[int],
    features: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    want: str = "rows and columns",
    tail: int = 3,
    pitch: int = 0,
    index: torch.dtype = torch.int64,
    finite: bool = True,
    is_transformed: bool = True,
    seed: int | None = None,
    x: Tensor | None = None,
) -> None:
    """Rows of the groups and of ``tail`` more, which are NaN and must be neither counted nor written."""
    buffer = rows_and_tail(sizes, features, dtype, tail, pitch, x)
    used, split_sizes = used_rows(sizes, buffer.shape[0]), torch.tensor(sizes, dtype=index)
    buffer[:used] = spread(buffer[:used]) if x is None else buffer[:used]
    if finite:
        buffer[:used].nan_to_num_(nan=1.5, posinf=3.0, neginf=-2.0)
    problem = rows_problem(device, format, buffer.to(device)[:, :features], split_sizes.to(device), want)
    problem.is_transformed = is_transformed
    problem.seed = None if seed is None else torch.tensor([seed], device=device)
    run(problem)
    assert_rows(problem, buffer[:, :features], split_sizes)


def rows_problem(
    device: str, format: PackedFormat, x: Tensor, split_sizes: Tensor, want: str, tokens: int | None = None
) -> FakeQuantizeRows:
    (number, features), groups, is_nv = x.shape, len(split_sizes), format is PackedFormat.NVFP4
    number = number if tokens is None else tokens
    blocked = (number // NV_BLOCK + groups) * NV_BLOCK
    rows = new_values(number, features, device=device) if "rows" in want else None
    columns = new_values(blocked if is_nv else number, features, device=device) if "columns" in want else None
    amaxes = (
        poisoned(groups, device=device, dtype=torch.float32) if is_nv and copy is not None else None
        for copy in (rows, columns)
    )
    return FakeQuantizeRows(x, split_sizes, format, rows, columns, *amaxes)


def run(problem: FakeQuantizing) -> None:
    assert fake_quantize.refusal(problem) is None, fake_quantize.refusal(problem)
    fake_quantize.run(problem)


def assert_rows(problem: FakeQuantizeRows, x: Tensor, split_sizes: Tensor) -> None:
    used = used_rows(split_sizes.tolist(), x.shape[0])
    check = _assert_mx if problem.format is PackedFormat.MXFP8 else _assert_nv
    past_rows, past_columns = check(problem, x, split_sizes, used)
    for memory in (problem.rows, problem.columns):
        if memory is not None:
            assert_untouched(memory[past_rows if memory is problem.rows else past_columns :], "values of no group")


def _assert_mx(problem: FakeQuantizeRows, x: Tensor, split_sizes: Tensor, used: int) -> tuple[int, int]:
    if problem.rows is not None:
        expected = mxfp8.dequantize_rows(mxfp8.quantize_rows(x))
        assert_same_values(problem.rows[:used], expected[:used], "values of rows")
    if problem.columns is not None:
        expected = mxfp8.dequantize_columns(mxfp8.quantize_columns(x, split_sizes), split_sizes)
        assert_same_values(problem.columns[:used], expected[:used], "values of columns")
    return used, used


def _assert_nv(problem: FakeQuantizeRows, x: Tensor, split_sizes: Tensor, used: int) -> tuple[int, int]:
    seed = None if problem.seed is None else problem.seed.cpu()
    blocks = int(reference.token_blocks(split_sizes, x.shape[0], NV_BLOCK).valid.any(1).sum())
    if problem.rows is not None and problem.row_amax is not None:
        rows = nvfp4.quantize_rows(x, split_sizes, seed)
        assert_same_values(problem.rows[:used], nvfp4.dequantize(rows)[:used], "values of rows")
        torch.testing.assert_close(problem.row_amax.cpu(), rows.amax, rtol=0, atol=0, equal_nan=True)
    if problem.columns is not None and problem.column_amax is not None:
        columns = nvfp4.quantize_columns(x, split_sizes, problem.is_transformed, seed)
        expected = nvfp4.dequantize(columns)[:blocks].transpose(1, 2).flatten(0, 1)
        assert_same_values(problem.columns[: len(expected)], expected, "values of columns")
        torch.testing.assert_close(problem.column_amax.cpu(), columns.amax, rtol=0, atol=0, equal_nan=True)
    return used, blocks * NV_BLOCK


def check_gathered_rows(device: str, format: PackedFormat, tokens: int, top_k: int, features: int, want: str) -> None:
    """Rows that are read where their tokens lie are those of a gathered copy."""
    r = routed(tokens, top_k, 5, features, torch.bfloat16, device)
    sizes = r.tokens_per_expert[:-1]
    problem = rows_problem(device, format, r.x, sizes, want, tokens * top_k)
    problem.slot_of_row, problem.top_k = r.slot_of_row, top_k
    run(problem)
    assert_rows(problem, r.x.cpu()[r.slot_of_row.cpu() // top_k], sizes.cpu())


def check_every_amax(device: str, format: PackedFormat, dtype: torch.dtype, part: slice) -> None:
    """Checks every amax: of blocks under MXFP8, and of groups of one row under NVFP4."""
    x = every_amax(dtype)[part, : 32 if format is PackedFormat.MXFP8 else 16].contiguous()
    sizes = [x.shape[0]] if format is PackedFormat.MXFP8 else [1] * x.shape[0]
    check_rows(device, format, sizes, x.shape[1], dtype, x=x, want="rows", tail=0, finite=False)


def check_weight(
    device: str,
    format: PackedFormat,
    experts: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    want: str = "rows and columns",
    separate: bool = False,
    finite: bool = True,
) -> None:
    weight = spread(values(experts * n, k, dtype)).view(experts, n, k)
    weight = weight.nan_to_num(nan=1.5, posinf=3.0, neginf=-2.0) if finite else weight
    stored, is_nv = weight.to(device), format is PackedFormat.NVFP4
    matrices = [matrix.clone() for matrix in stored] if separate else stored
    rows = new_values(experts, n, k, device=device) if "rows" in want or is_nv else None
    columns = new_values(experts, n, k, device=device) if "columns" in want and not is_nv else None
    amax = poisoned(experts, device=device, dtype=torch.float32) if is_nv else None
    run(FakeQuantizeWeight(matrices, format, rows, columns, amax))
    if amax is not None and rows is not None:
        copy = nvfp4.quantize_weight(weight)
        assert_same_values(rows, nvfp4.dequantize(copy), "values")
        if n % NV_BLOCK == 0:
            turned = nvfp4.dequantize(nvfp4.quantize_weight(weight.mT)).mT
            assert_same_values(rows, turned, "values for the gradient")
        return torch.testing.assert_close(amax.cpu(), copy.amax, rtol=0, atol=0, equal_nan=True)
    if rows is not None:
        assert_same_values(rows, mxfp8.dequantize_rows(mxfp8.quantize_rows(weight)), "values along k")
    if columns is not None:
        assert_same_values(columns, mxfp8.dequantize_rows(mxfp8.quantize_rows(weight.mT)).mT, "values along n")
    return None
