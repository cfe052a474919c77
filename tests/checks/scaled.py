"""Checks of products of e4m3 operands against float64, one launch at a time, on a GPU or its emulation.

What must not be read is NaN: bytes and scales of the tail, of other groups' unused blocks, of the columns between a
row's end and its pitch. What must not be written is checked bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusible import check_device_errors
from fusible.ops.formats.copies import BLOCK, Columns, Rows, ceil_blocks
from fusible.ops.kernels.hopper import scaled_gemm as hopper
from fusible.ops.kernels.problems.quantized import ScaledGemm, ScaledWgrad

from .device import synchronize

E4M3 = torch.float8_e4m3fn
NAN_BYTE = 127
ACCUMULATION = 2e-3
"""Of the sum of |a| |b|: what products lose whose blocks are summed with 13 fraction bits, at most."""
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


@dataclass(frozen=True)
class Case:
    """One problem: static shapes, the sizes of the groups, and what is asked for."""

    sizes: tuple[int, ...]
    n: int = 264
    k: int = 272
    tail: int = 37
    out_dtype: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None
    halves: int = 1
    factors: bool = False  # of rows, of the bias in each row, and of groups
    transposed_scales: bool = False  # as the gradient of the rows reads those of a weight
    whole_rows: bool = False  # have one scale each
    one_scale: bool = False  # of all rows of a weight, without memory of its own
    fast: bool = False  # sums are not promoted
    same_sign: bool = False
    index: torch.dtype = torch.int32
    gap: int = 0  # bytes between a row and the next


def check_gemm(device: str, case: Case) -> None:
    """One product of rows and weights, in every element."""
    problem, truth, magnitude = make_gemm(device, case)
    untouched = problem.out.clone()
    hopper.launch_gemm(problem)
    synchronize(device)
    check_device_errors()
    rows = sum(case.sizes)
    assert torch.equal(bits(problem.out[rows:]), bits(untouched[rows:])), "the tail was written"
    _compare(problem.out[:rows], truth, magnitude, case)


def _compare(out: Tensor, truth: Tensor, magnitude: Tensor, case: Case) -> None:
    allowed = ACCUMULATION * magnitude + HALF_STEP[case.out_dtype] * truth.abs()
    error = (out.double() - truth).abs()
    assert not error.isnan().any(), "NaN in the result"
    worst = (error - allowed).argmax() if error.numel() else 0
    assert (error <= allowed).all(), f"{case}: off by {error.flatten()[worst]}, allowed {allowed.flatten()[worst]}"
    loss = float(error.norm() / truth.norm().clamp(min=1e-30))
    assert loss < HALF_STEP[case.out_dtype] + (1e-3 if case.same_sign else 3e-4), f"{case}: relative error {loss}"


def make_gemm(device: str, case: Case) -> tuple[ScaledGemm, Tensor, Tensor]:
    """The problem; its result of the rows of groups in float64, and that of the magnitudes of all operands."""
    random, groups, rows = _generator(device, case), len(case.sizes), sum(case.sizes)
    tokens = rows + case.tail
    data = _with_gaps(_bytes(random, case, tokens, case.k), case.gap)
    data.view(torch.uint8)[rows:] = NAN_BYTE
    weight = _bytes(random, case, groups, case.n, case.k)
    scales, of_values = _row_scales(random, case, tokens)
    grid = _weight_scales(random, case)
    left = data[:rows].double() * of_values.double()
    right = weight.double() * (grid.double()[..., None] if case.whole_rows else _spread(grid.double(), case))
    bias, row_scale, bias_scale, alpha = _epilogue(random, case, tokens)
    problem = ScaledGemm(
        a=Rows(data, scales),
        weight=weight,
        weight_scales=grid,
        halves=case.halves,
        split_sizes=torch.tensor(case.sizes, dtype=case.index, device=device),
        out=torch.full((tokens, case.n), math.nan, dtype=case.out_dtype, device=device),
        bias=bias,
        row_scale=row_scale,
        bias_scale=bias_scale,
        alpha=alpha,
        fast_accumulation=case.fast,
    )
    truth, magnitude = [], []
    for g, part in enumerate(left.split(case.sizes)):
        at = slice(sum(case.sizes[:g]), sum(case.sizes[: g + 1]))
        truth.append(_finish(part @ right[g].mT, bias, problem, g, at))
        largest = None if bias is None else bias.abs()
        magnitude.append(_finish(part.abs() @ right[g].abs().mT, largest, problem, g, at))
    return problem, torch.cat(truth), torch.cat(magnitude)


def _row_scales(random: torch.Generator, case: Case, tokens: int) -> tuple[Tensor, Tensor]:
    """The scales of rows, NaN in the tail, and the scale of each value of the groups' rows."""
    rows, blocks = sum(case.sizes), ceil_blocks(case.k)
    if case.whole_rows:
        scales = torch.full((tokens,), math.nan, device=random.device)
        scales[:rows] = _scales(random, rows)
        return scales, scales[:rows, None]
    scales = torch.full((blocks, -(-tokens // 4) * 4), math.nan, device=random.device)
    scales[:, :rows] = _scales(random, blocks, rows)
    return scales, scales[:, :rows].mT.repeat_interleave(BLOCK, 1)[:, : case.k]


def _weight_scales(random: torch.Generator, case: Case) -> Tensor:
    groups, blocks = len(case.sizes), ceil_blocks(case.k)
    if case.one_scale:
        return _scales(random, groups, 1).expand(groups, case.n)
    if case.whole_rows:
        return _scales(random, groups, case.n)
    grid = _scales(random, groups, case.halves * ceil_blocks(case.n // case.halves), blocks)
    return grid.mT.contiguous().mT if case.transposed_scales else grid


def _finish(product: Tensor, bias: Tensor | None, p: ScaledGemm, group: int, rows: slice) -> Tensor:
    """The epilogue of a group's product; all factors are positive."""
    if p.alpha is not None:
        product = product * p.alpha[group].double()
    if bias is not None:
        factors = 1.0 if p.bias_scale is None else p.bias_scale[rows].double()[:, None]
        product = product + bias[group].double() * factors
    return product if p.row_scale is None else product * p.row_scale[rows].double()[:, None]


def _epilogue(random: torch.Generator, case: Case, tokens: int) -> tuple[Tensor | None, ...]:
    """Bias, and factors of rows, of the bias in each row, and of groups."""
    groups, rows, device = len(case.sizes), sum(case.sizes), random.device
    bias = None
    if case.bias is not None:
        bias = (torch.randn(groups, case.n, generator=random, device=device) * 100).to(case.bias)
    if not case.factors:
        return bias, None, None, None
    of_rows = torch.full((2, tokens), math.nan, device=device)
    of_rows[:, :rows] = torch.rand(2, rows, generator=random, device=device) + 0.5
    return bias, of_rows[0], of_rows[1], torch.rand(groups, generator=random, device=device) + 0.5


@dataclass(frozen=True)
class WgradCase:
    """One weight gradient."""

    sizes: tuple[int, ...]
    m: int = 264
    n: int = 200
    tail: int = 37
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False
    separate: bool = False  # gradients of groups anywhere in memory
    same_sign: bool = False
    index: torch.dtype = torch.int64
    variant: int = -1


def check_wgrad(device: str, case: WgradCase) -> None:
    """One weight gradient, in every element; those of empty groups are zeros, or as they were."""
    problem, truth, magnitude = make_wgrad(device, case)
    before = [out.clone() for out in problem.out]
    hopper.launch_wgrad(problem, case.variant)
    synchronize(device)
    check_device_errors()
    for g, out in enumerate(problem.out):
        if case.sizes[g] == 0:
            assert torch.equal(out, before[g] if case.accumulate else torch.zeros_like(out)), "an empty group"
            continue
        old = before[g].double() if case.accumulate else torch.zeros_like(truth[g])
        _compare(out, truth[g] + old, magnitude[g] + old.abs() * 1e-4, case)  # type: ignore[arg-type]


def make_wgrad(device: str, case: WgradCase) -> tuple[ScaledWgrad, Tensor, Tensor]:
    """The problem; its result in float64, and that of the magnitudes of all operands."""
    random, tokens = _generator(device, case), sum(case.sizes) + case.tail
    a, b = (_blocked(random, case, columns, tokens) for columns in (case.m, case.n))
    truth, magnitude, first = [], [], 0
    for size in case.sizes:
        blocks = slice(first, first := first + ceil_blocks(size))
        left, right = (x.data[blocks].double() * x.scales[blocks].double()[..., None] for x in (a, b))
        truth.append(torch.einsum("bmt,bnt->mn", left, right))
        magnitude.append(torch.einsum("bmt,bnt->mn", left.abs(), right.abs()))
    start = (
        torch.randn(len(case.sizes), case.m, case.n, generator=random, device=device) if case.accumulate else math.nan
    )
    out = torch.empty(len(case.sizes), case.m, case.n, dtype=case.out_dtype, device=device)
    out[:] = start
    problem = ScaledWgrad(
        a=a,
        b=b,
        split_sizes=torch.tensor(case.sizes, dtype=case.index, device=device),
        rows=tokens,
        out=[matrix.clone() for matrix in out] if case.separate else out,
        accumulate=case.accumulate,
    )
    return problem, torch.stack(truth), torch.stack(magnitude)


def _blocked(random: torch.Generator, case: WgradCase, columns: int, tokens: int) -> Columns:
    """Tokens of each group in blocks; NaN in the blocks that none uses."""
    blocks, device = tokens // BLOCK + len(case.sizes), random.device
    data = torch.full((blocks, columns, BLOCK), NAN_BYTE, dtype=torch.uint8, device=device)
    scales = torch.full((blocks, columns), math.nan, device=device)
    first = 0
    for size in case.sizes:
        used = ceil_blocks(size)
        numbers = _bytes(random, case, used, columns, BLOCK).view(torch.uint8)
        if size % BLOCK:
            numbers[-1, :, size % BLOCK :] = 0
        data[first : first + used], scales[first : first + used] = numbers, _scales(random, used, columns)
        first += used
    return Columns(data.view(E4M3), scales)


def check_same_sign(device: str, whole_rows: bool = False) -> None:
    """A long sum of equal signs, of which accumulators of 13 fraction bits alone lose 7 %."""
    case = Case((65, 40), n=136, k=4096, out_dtype=torch.float32, same_sign=True, whole_rows=whole_rows)
    assert 0 < _lost(device, case) < 2e-3
    if whole_rows:
        assert 0.03 < _lost(device, replace(case, fast=True)) < 0.15


def _lost(device: str, case: Case) -> float:
    """How much of the sum of a product is lost."""
    problem, _, _ = make_gemm(device, case)
    problem.weight_scales.fill_(1.0)
    problem.a.scales.fill_(1.0)
    hopper.launch_gemm(problem)
    synchronize(device)
    rows = problem.a.data[:105].double()
    want = torch.cat([rows[:65] @ problem.weight[0].double().mT, rows[65:] @ problem.weight[1].double().mT])
    return 1 - float(problem.out[:105].double().sum() / want.sum())


def check_poisoned_rows(device: str, whole_rows: bool = False, fast: bool = False) -> None:
    """NaN in the rows of a group, in bytes and in scales, reaches its own results alone."""
    case = Case((70, 30, 65), k=272, tail=0, whole_rows=whole_rows, fast=fast)
    problem, _, _ = make_gemm(device, case)
    hopper.launch_gemm(problem)
    synchronize(device)
    clean = problem.out.clone()
    problem.a.data.view(torch.uint8)[70:85] = NAN_BYTE
    problem.a.scales[..., 85:100] = math.nan
    hopper.launch_gemm(problem)
    synchronize(device)
    assert problem.out[70:100].isnan().all()
    assert torch.equal(bits(problem.out[:70]), bits(clean[:70]))
    assert torch.equal(bits(problem.out[100:]), bits(clean[100:]))


def check_poisoned_group(device: str, variant: int = -1) -> None:
    """NaN in the blocks of a group reaches its own weight gradient alone."""
    problem, _, _ = make_wgrad(device, WgradCase((70, 130, 0, 65), variant=variant))
    hopper.launch_wgrad(problem, variant)
    synchronize(device)
    clean = [out.clone() for out in problem.out]
    problem.a.scales[1:3] = math.nan
    problem.b.data.view(torch.uint8)[1:3] = NAN_BYTE
    hopper.launch_wgrad(problem, variant)
    synchronize(device)
    assert problem.out[1].isnan().all()
    for group in (0, 2, 3):
        assert torch.equal(bits(problem.out[group]), bits(clean[group]))


def check_groups_alone(device: str) -> None:
    """A group's result is the same, bit by bit, among other groups and alone."""
    problem, _, _ = make_gemm(device, Case((70, 0, 130, 65), tail=3))
    hopper.launch_gemm(problem)
    pitch = 132
    scales = torch.zeros(problem.a.scales.shape[0], pitch, device=device)
    scales[:, :130] = problem.a.scales[:, 70:200]
    alone = ScaledGemm(
        a=Rows(problem.a.data[70:200], scales),
        weight=problem.weight[2:3],
        weight_scales=problem.weight_scales[2:3],
        halves=1,
        split_sizes=problem.split_sizes[2:3],
        out=torch.empty_like(problem.out[70:200]),
    )
    hopper.launch_gemm(alone)
    synchronize(device)
    assert torch.equal(bits(alone.out), bits(problem.out[70:200]))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _generator(device: str, case: Case | WgradCase) -> torch.Generator:
    return torch.Generator(device).manual_seed(len(case.sizes) * 1000 + case.n)


def _bytes(random: torch.Generator, case: Case | WgradCase, *shape: int) -> Tensor:
    numbers = torch.randn(shape, generator=random, device=random.device) * 100
    return (numbers.abs() if case.same_sign else numbers).clamp(-448, 448).to(E4M3)


def _with_gaps(data: Tensor, gap: int) -> Tensor:
    """The same rows, between which are bytes of NaN."""
    return torch.nn.functional.pad(data.view(torch.uint8), (0, gap), value=NAN_BYTE).view(E4M3)[:, : data.shape[1]]


def _scales(random: torch.Generator, *shape: int) -> Tensor:
    """Scales whose magnitudes differ from block to block."""
    return torch.exp2(torch.rand(shape, generator=random, device=random.device) * 4 - 8)


def _spread(grid: Tensor, case: Case) -> Tensor:
    """The scale of each value of a weight."""
    halves = grid.unflatten(1, (case.halves, -1)).repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return halves[..., : case.n // case.halves, : case.k].flatten(1, 2)
