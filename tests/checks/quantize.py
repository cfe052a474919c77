"""Checks of the kernels that quantise, bit for bit against the reference on the CPU, on a GPU or its emulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import Pointwise
from fusible.ops import kernels
from fusible.ops.formats import reference
from fusible.ops.formats.copies import BLOCK, Columns, Rows, ceil_blocks
from fusible.ops.formats.quantized_tokens import decoded
from fusible.ops.kernels.hopper import quantize, rows
from fusible.ops.kernels.problems.gemm import ActivationGrads, Operands
from fusible.ops.kernels.problems.quantized import (
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizedWeight,
    QuantizeRows,
    QuantizeWeight,
)
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

from .functions import ACTS_OF_COLUMNS, Act, op_of_columns

HALVES = [torch.bfloat16, torch.float16]
SIZES = [
    [300, 0, 77, 1, 128, 0, 129],
    [0, 0, 0],
    [1],
    [127],
    [0, 256, 0],
    [64, -9, 2**31 - 1, 5],  # lies: cut off where they are read
]
WEIGHTS: list[dict[str, Any]] = [
    {"experts": 3, "n": 352, "k": 272},
    {"experts": 2, "n": 352, "k": 128, "halves": 2, "power_of_two": False},
    {"experts": 3, "n": 16, "k": 400, "separate": True, "transposed": False},
    {"experts": 2, "n": 144, "k": 272, "stored_transposed": True},
    {"experts": 2, "n": 256, "k": 144, "halves": 2, "separate": True, "stored_transposed": True},
]
SPECS: dict[str, ActivationSpec] = {
    "silu glu": gated("silu", None, 1.0, 0.0, "concat"),
    "sigmoid": ActivationSpec("sigmoid"),  # not 0 of 0, which rows that do not exist must be
    "gelu_tanh": ActivationSpec("gelu_tanh"),
    "relu2 glu": gated("relu2", None, 1.0, 0.0, "concat"),
    "limited": gated("silu", 1.5, 1.702, 1.0, "concat"),
    "blocks of 1": gated("silu", 7.0, 1.702, 1.0, interleaved(1)),
    "blocks of 2": gated("gelu", None, 1.0, 0.0, interleaved(2)),
    "blocks of 4": gated("sigmoid", None, 1.0, 0.0, interleaved(4)),
    "blocks of 32": gated("silu", None, 1.0, 0.0, interleaved(32)),
    "blocks of 128": gated("gelu", 1.0, 1.0, 0.5, interleaved(128)),
}
FUNCTIONS: dict[str, Act] = {
    "user's": Pointwise(lambda x: x * torch.tanh(x) + 0.25),
    "user's glu": Pointwise(lambda g, u: g.clamp(max=1.5) * torch.sigmoid(1.702 * g) * (u + 1), halves="concat"),
    "user's glu of a row": Pointwise(lambda g, u, s: torch.tanh(g * s) * u, halves="concat"),
    "user's slope": op_of_columns("slope"),
    "user's shift": op_of_columns("shift"),
    "user's slope of a row, blocks of 1": op_of_columns("slope of a row", interleaved(1)),
    "user's slope, blocks of 128": op_of_columns("slope", interleaved(128)),
    "user's biases": ACTS_OF_COLUMNS["biases"][0]("concat"),
    "user's slopes of gate and up, blocks of 4": ACTS_OF_COLUMNS["slopes of gate and up"][0](interleaved(4)),
}
"""Functions of users: they have kernels of their own."""
POISON = 0xA5


def spec_of(name: str) -> ActivationSpec:
    """The spec of a name in :data:`SPECS` or :data:`FUNCTIONS`."""
    spec = SPECS[name] if name in SPECS else FUNCTIONS[name].spec
    assert spec is not None
    return spec


def columns_of(
    spec: ActivationSpec, features: int, split_sizes: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...] | None:
    """Numbers of columns, NaN for groups without rows; None for what reads none."""
    if spec.program is None or not spec.program.columns:
        return None
    generator, empty, vectors = torch.Generator().manual_seed(9), split_sizes.cpu() <= 0, []
    for name, inputs in spec.program.column_operands.items():
        rows = 1 if name[0] == "a" else len(split_sizes)
        vector = torch.rand(rows, features * len(inputs), generator=generator) + 0.5
        vectors.append(vector if rows == 1 else vector.masked_fill(empty[:, None], math.nan))
    return tuple([vector.to(split_sizes.device, dtype) for vector in vectors])


def activate(
    preact: Tensor, spec: ActivationSpec, scales: Tensor | None, vectors: Operands, split_sizes: Tensor, out: Tensor
) -> None:
    """By the kernel that does nothing else."""
    if spec.program is None:
        rows.forward(preact, spec, scales, out)
    else:
        out.copy_(kernels.activate(preact, spec, scales, vectors, None if vectors is None else split_sizes))


def poisoned(*shape: int, device: str, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Memory in which every byte that is not written is seen."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full((math.prod(shape) * size,), POISON, dtype=torch.uint8, device=device).view(dtype).view(shape)


def rows_copy(tokens: int, features: int, device: str) -> Rows:
    return Rows(
        poisoned(tokens, features, device=device, dtype=torch.float8_e4m3fn),
        poisoned(ceil_blocks(features), -(-tokens // 4) * 4, device=device, dtype=torch.float32),
    )


def columns_copy(tokens: int, groups: int, features: int, device: str) -> Columns:
    blocks = tokens // BLOCK + groups
    return Columns(
        poisoned(blocks, features, BLOCK, device=device, dtype=torch.float8_e4m3fn),
        poisoned(blocks, features, device=device, dtype=torch.float32),
    )


def weight_copy(experts: int, n: int, k: int, halves: int, transposed: bool, device: str) -> QuantizedWeight:
    return QuantizedWeight(
        poisoned(experts, n, k, device=device, dtype=torch.float8_e4m3fn),
        poisoned(experts, k, n, device=device, dtype=torch.float8_e4m3fn) if transposed else None,
        poisoned(experts, halves * ceil_blocks(n // halves), ceil_blocks(k), device=device, dtype=torch.float32),
    )


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


def assert_same(got: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(bits(got), bits(expected), rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def assert_untouched(memory: Tensor, what: str) -> None:
    assert (memory.cpu().contiguous().view(torch.uint8) == POISON).all(), what


def values(tokens: int, features: int, dtype: torch.dtype) -> Tensor:
    """Magnitudes that differ from block to block, zeros, and a few values that are not finite."""
    generator = torch.Generator().manual_seed(tokens + features)
    magnitude = torch.randint(-12, 12, (tokens, ceil_blocks(features)), generator=generator).float().exp2()
    magnitude = magnitude.repeat_interleave(BLOCK, 1)[:, :features]
    x = (torch.randn(tokens, features, generator=generator) * magnitude).to(dtype)
    x[tokens // 3, :BLOCK] = 0
    x[tokens // 2 :, features // 2] = 0
    x[-1, -1] = -0.0
    if tokens > 5:
        x[2, 3], x[4, 5], x[5, -1] = math.inf, math.nan, -math.inf
    return x


def used_rows(sizes: Sequence[int], tokens: int) -> int:
    return min(tokens, sum(max(0, size) for size in sizes))


def rows_and_tail(
    sizes: Sequence[int], features: int, dtype: torch.dtype, tail: int, pitch: int, x: Tensor | None
) -> Tensor:
    """[T, K + pitch]: the rows of the groups, ``x`` or else random values, and ``tail`` more; all else is NaN."""
    tokens = (sum(size for size in sizes if 0 < size < 2**20) if x is None else x.shape[0]) + tail
    buffer = torch.full((tokens, features + pitch), math.nan, dtype=dtype)
    used = used_rows(sizes, tokens)
    buffer[:used, :features] = values(max(used, 1), features, dtype)[:used] if x is None else x
    return buffer


def check_rows(
    device: str,
    sizes: Sequence[int],
    features: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    power_of_two: bool = True,
    tail: int = 3,
    want: str = "rows and columns",
    index: torch.dtype = torch.int64,
    pitch: int = 0,
    x: Tensor | None = None,
) -> None:
    """Rows of the groups and of ``tail`` more, which are NaN and must be neither counted nor written."""
    buffer = rows_and_tail(sizes, features, dtype, tail, pitch, x)
    tokens, split_sizes = buffer.shape[0], torch.tensor(sizes, dtype=index)
    rows = rows_copy(tokens, features, device) if "rows" in want else None
    columns = columns_copy(tokens, len(sizes), features, device) if "columns" in want else None
    run_rows(QuantizeRows(buffer.to(device)[:, :features], split_sizes.to(device), power_of_two, rows, columns))
    assert_rows(rows, buffer[:, :features], used_rows(sizes, tokens), power_of_two)
    assert_columns(columns, buffer[:, :features], split_sizes, power_of_two)


def check_columns_of_bytes(device: str, sizes: Sequence[int], features: int, tail: int = 3, pitch: int = 0) -> None:
    """Columns of rows of e4m3 are those of their values; powers of two of any size, 0 and NaN among them."""
    tokens, blocks = sum(size for size in sizes if 0 < size < 2**20) + tail, ceil_blocks(features)
    width, split_sizes = -(-(features + blocks) // 8) * 8 + pitch, torch.tensor(sizes)
    draw = torch.Generator().manual_seed(tokens + features)
    memory = torch.randint(256, (tokens, width), generator=draw, dtype=torch.uint8)
    exponents = memory[:, features : features + blocks]
    near_one = torch.randint(100, 140, exponents.shape, generator=draw, dtype=torch.uint8)
    exponents.copy_(torch.where(torch.rand(exponents.shape, generator=draw) < 0.8, near_one, exponents))
    data, copy = memory[:, :features].view(torch.float8_e4m3fn), memory.to(device)
    columns = columns_copy(tokens, len(sizes), features, device)
    rows, of_rows = copy[:, :features].view(torch.float8_e4m3fn), copy[:, features : features + blocks]
    run_rows(QuantizeRows(rows, split_sizes.to(device), True, None, columns, exponents=of_rows))
    assert_columns(columns, decoded(data, exponents), split_sizes, True)


def run_rows(problem: QuantizeRows) -> None:
    assert quantize.refusal(problem) is None, quantize.refusal(problem)
    quantize.run(problem)


def assert_rows(rows: Rows | None, x: Tensor, used: int, power_of_two: bool) -> None:
    if rows is None:
        return
    expected = reference.quantize_rows(x, power_of_two)
    assert_same(rows.data[:used], expected.data[:used], "bytes of rows")
    assert_same(rows.scales[:, :used], expected.scales[:, :used], "scales of rows")
    assert_untouched(rows.data[used:], "bytes past the last group")
    assert_untouched(rows.scales[:, used:], "scales past the last group")


def assert_columns(columns: Columns | None, x: Tensor, split_sizes: Tensor, power_of_two: bool) -> None:
    if columns is None:
        return
    expected = reference.quantize_columns(x, split_sizes, power_of_two)
    used = int(reference.token_blocks(split_sizes, x.shape[0]).valid.any(1).sum())
    assert_same(columns.data[:used], expected.data[:used], "bytes of columns")
    assert_same(columns.scales[:used], expected.scales[:used], "scales of columns")
    assert_untouched(columns.data[used:], "blocks that no group uses")
    assert_untouched(columns.scales[used:], "scales of blocks that no group uses")


def every_amax(dtype: torch.dtype) -> Tensor:
    """[2^15, 128]: every magnitude, as the largest of a row of others."""
    amax = torch.arange(2**15, dtype=torch.int16).view(dtype).float().unsqueeze(1)
    share = torch.rand(2**15, BLOCK, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.cat((amax, (amax * share)[:, 1:]), 1).to(dtype)


def check_every_amax_of_rows(device: str, dtype: torch.dtype, power_of_two: bool, rows: slice) -> None:
    x = every_amax(dtype)[rows]
    check_rows(device, [x.shape[0]], BLOCK, dtype, power_of_two=power_of_two, want="rows", x=x, tail=0)


def check_every_amax_of_columns(device: str, dtype: torch.dtype, power_of_two: bool, features: slice) -> None:
    x = every_amax(dtype)[features].t().contiguous()
    check_rows(device, [BLOCK], x.shape[1], dtype, power_of_two=power_of_two, want="columns", x=x, tail=0)


def check_every_value(device: str, dtype: torch.dtype) -> None:
    """Every number of 16 bits as e4m3: a block with an infinity is multiplied by 1, and saturates."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    x = torch.cat((torch.full_like(numbers, math.inf), numbers), 1)
    check_rows(device, [x.shape[0]], BLOCK, dtype, x=x, tail=0)


def check_weight(
    device: str,
    experts: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    halves: int = 1,
    power_of_two: bool = True,
    transposed: bool = True,
    separate: bool = False,
    stored_transposed: bool = False,
) -> None:
    weight = values(experts * n, k, dtype).view(experts, n, k)
    stored = weight.mT.contiguous().to(device).mT if stored_transposed else weight.to(device)
    matrices = [matrix.clone() for matrix in stored] if separate else stored
    out = weight_copy(experts, n, k, halves, transposed, device)
    problem = QuantizeWeight(matrices, halves, power_of_two, out)
    assert quantize.refusal(problem) is None, quantize.refusal(problem)
    quantize.run(problem)
    expected = reference.quantize_weight(weight, halves, power_of_two)
    assert_same(out.data, expected.data, "bytes")
    assert_same(out.scales, expected.scales, "scales")
    if out.transposed is not None:
        assert_same(out.transposed, expected.data.mT.contiguous(), "transposed bytes")


class Activated(NamedTuple):
    """The inputs of an activation's forward and backward; rows past the last group are NaN."""

    preact: Tensor
    dpostact: Tensor
    scales: Tensor | None
    split_sizes: Tensor
    used: int


def activated(
    device: str, spec: ActivationSpec, sizes: Sequence[int], features: int, dtype: torch.dtype, scales: Any
) -> Activated:
    wide, used = features * (2 if spec.gated else 1), sum(size for size in sizes if 0 < size < 2**20)
    preact, dpostact = (torch.full((used + 3, columns), math.nan, dtype=dtype) for columns in (wide, features))
    preact[:used], dpostact[:used] = (torch.randn(used, t.shape[1]).to(dtype) for t in (preact, dpostact))
    dpostact[: used // 2] *= 2.0**-9
    factors = None if scales is None else torch.rand(used + 3).to(scales).to(device)
    if factors is not None:
        factors[used:] = math.nan
    split_sizes = torch.tensor(sizes, device=device)
    return Activated(preact.to(device), dpostact.to(device), factors, split_sizes, used)


def check_activation(
    device: str,
    name: str,
    features: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sizes: Sequence[int] = (130, 0, 1, 40),
    power_of_two: bool = True,
    scales: torch.dtype | None = torch.float32,
    want: str = "rows and columns",
) -> None:
    """The bytes are those of the activation that its own kernel stores."""
    spec = spec_of(name)
    preact, dpostact, factors, split_sizes, used = activated(device, spec, sizes, features, dtype, scales)
    postact, vectors = torch.empty_like(dpostact), columns_of(spec, features, split_sizes)
    activate(preact, spec, factors, vectors, split_sizes, postact)
    by_row = rows_copy(*dpostact.shape, device) if "rows" in want else None
    by_column = columns_copy(len(preact), len(sizes), features, device) if "columns" in want else None
    problem = QuantizeActivation(preact, split_sizes, spec, factors, power_of_two, by_row, by_column, vectors)
    assert quantize.refusal(problem) is None, quantize.refusal(problem)
    quantize.run(problem)
    assert_rows(by_row, postact.cpu(), used, power_of_two)
    assert_columns(by_column, postact.cpu(), split_sizes.cpu(), power_of_two)


def check_activation_backward(
    device: str,
    name: str,
    features: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sizes: Sequence[int] = (130, 0, 1, 40),
    power_of_two: bool = True,
    scales: torch.dtype | None = torch.float32,
    want: str = "rows, columns, postact, dscales, dvectors",
) -> None:
    """The bytes are those of what the kernel of the activation's backward stores."""
    spec = spec_of(name)
    preact, dpostact, factors, split_sizes, used = activated(device, spec, sizes, features, dtype, scales)
    vectors = columns_of(spec, features, split_sizes)
    expected = _gradients(dpostact, preact, spec, factors, vectors, split_sizes)
    dvectors = None if vectors is None or "dvectors" not in want else tuple(torch.full_like(v, -7) for v in vectors)
    by_row = rows_copy(*preact.shape, device) if "rows" in want else None
    by_column, postact = (
        columns_copy(len(preact), len(sizes), tensor.shape[1], device) if part in want else None
        for part, tensor in (("columns", preact), ("postact", dpostact))
    )
    dscales = torch.full_like(factors, math.nan) if factors is not None and "dscales" in want else None
    problem = QuantizeActivationBackward(
        *(dpostact, preact, split_sizes, spec, factors, power_of_two, by_row, by_column, postact, dscales),
        *(vectors, dvectors),
    )
    assert quantize.refusal(problem) is None, quantize.refusal(problem)
    quantize.run(problem)
    assert_rows(by_row, expected.preact.cpu(), used, power_of_two)
    assert_columns(by_column, expected.preact.cpu(), split_sizes.cpu(), power_of_two)
    assert expected.postact is not None
    assert_columns(postact, expected.postact.cpu(), split_sizes.cpu(), power_of_two)
    if dscales is not None:
        assert expected.scales is not None
        step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(dscales.dtype, 1e-4)
        torch.testing.assert_close(dscales[:used], expected.scales[:used], rtol=step, atol=step)
        assert (dscales[used:] == 0).all()
    if dvectors is not None and vectors is not None:
        wide = [None if t is None else t.double() for t in (dpostact, preact, factors)]
        truth = _gradients(wide[0], wide[1], spec, wide[2], tuple(v.double() for v in vectors), split_sizes)
        step = 1e-3 if device == "cpu" else 2e-2  # a GPU has approximations of elementary functions
        for vector, exact in zip(dvectors, truth.vectors, strict=True):
            torch.testing.assert_close(vector.double(), exact, rtol=step, atol=step)


def _gradients(
    dpostact: Tensor,
    preact: Tensor,
    spec: ActivationSpec,
    scales: Tensor | None,
    vectors: Operands,
    split_sizes: Tensor,
) -> ActivationGrads:
    """By the kernel that does nothing else, which knows no tail."""
    if spec.program is None:
        grads = ActivationGrads(*(None if t is None else torch.empty_like(t) for t in (preact, scales, dpostact)))
        rows.backward(dpostact, preact, spec, scales, grads)
        return grads
    of_groups = {"vectors": vectors, "split_sizes": None if vectors is None else split_sizes}
    wanted = {"want_scales": True, "want_postact": True, "want_vectors": True}
    rows_read = dpostact.nan_to_num(), preact.nan_to_num(), spec, None if scales is None else scales.nan_to_num()
    return kernels.activate_backward(*rows_read, **wanted, **of_groups)  # type: ignore[arg-type]


class Routed(NamedTuple):
    """Tokens, and where their slots go; some slots are of no expert."""

    x: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    tokens_per_expert: Tensor


def routed(tokens: int, top_k: int, experts: int, features: int, dtype: torch.dtype, device: str) -> Routed:
    ids = torch.randint(0, experts + 1, (tokens, top_k)).view(-1)
    ids[ids == 1] = 0  # one without rows
    slot_of_row = ids.sort(stable=True).indices
    counts = ids.bincount(minlength=experts + 1)[:experts]
    parts = slot_of_row, slot_of_row.argsort().view(tokens, top_k), torch.cat((counts, counts.sum().view(1)))
    return Routed(values(tokens, features, dtype).to(device), *(t.int().contiguous().to(device) for t in parts))


def check_gathered_rows(device: str, tokens: int, top_k: int, features: int, dtype: torch.dtype, want: str) -> None:
    """Rows that are read where their tokens lie are those of a gathered copy."""
    r, experts = routed(tokens, top_k, 5, features, dtype, device), 5
    sizes, rows = r.tokens_per_expert[:-1], tokens * top_k
    by_row = rows_copy(rows, features, device) if "rows" in want else None
    by_column = columns_copy(rows, experts, features, device) if "columns" in want else None
    run_rows(QuantizeRows(r.x, sizes, True, by_row, by_column, r.slot_of_row, top_k))
    gathered = r.x.cpu()[r.slot_of_row.cpu() // top_k]
    assert_rows(by_row, gathered, int(sizes.sum()), True)
    assert_columns(by_column, gathered, sizes.cpu(), True)
