"""Checks of products with MXFP4 weights as they are stored, on a GPU or its emulation: in float64 of decoded values.

What must not be read is NaN: rows of the tail. What must not be written is checked bit by bit.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import stored_formats
import torch
from kernels_asked import noted
from torch import Tensor

import fusible
from fusible import MXFP4, GroupedLinear, SwiGLU, check_device_errors
from fusible.ops.formats.copies import Weight
from fusible.ops.kernels.hopper import stored_gemm as hopper
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout, OperandPair
from fusible.ops.kernels.problems.kinds import STORED
from fusible.ops.kernels.problems.quantized import StoredGemm

from .device import synchronize
from .recipes import Kernels
from .scaled import HALF_STEP, bits

ACCUMULATION = 1e-5
"""The most that sums in float32 lose, relative to the sum of |a| |b|."""
SCALES = (0, 1, 2, 64, 100, 120, 126, 127, 128, 129, 136, 137, 150, 200, 253, 254)
"""Bytes of scales: the smallest, the largest, and those around one, and around where a factor alone does not do."""


@dataclass(frozen=True)
class Case:
    """One problem: static shapes, the sizes of the groups, and what is asked for."""

    layout: Layout
    sizes: tuple[int, ...] = (37, 0, 1, 70)
    n: int = 136
    k: int = 192
    tail: int = 5
    rank: int = 0
    bias: torch.dtype | None = None
    factors: bool = False  # of rows, and of the bias in each row
    index: torch.dtype = torch.int32


def check(device: str, case: Case) -> None:
    """One product, in every element."""
    problem = make(device, case)
    out, rows = problem.product.out, sum(case.sizes)
    assert isinstance(out, Tensor)
    untouched = out.clone()
    assert hopper.refusal(problem) is None, hopper.refusal(problem)
    hopper.run(problem)
    synchronize(device)
    check_device_errors()
    assert torch.equal(bits(out[rows:]), bits(untouched[rows:])), "the tail was written"
    truth, magnitude = _truth(problem, case)
    error = (out[:rows].double().cpu() - truth).abs()
    allowed = ACCUMULATION * magnitude + HALF_STEP[torch.bfloat16] * truth.abs()
    assert not error.isnan().any(), "NaN in the result"
    assert (error <= allowed).all(), f"{case}: off by {float((error - allowed).max())}"
    hopper.run(StoredGemm(replace(problem.product, fresh=True), problem.scales))
    synchronize(device)
    assert not out[rows:].any(), "the tail is not zero"


def make(device: str, case: Case) -> StoredGemm:
    """Random rows and codes, under scales around one."""
    random = torch.Generator().manual_seed(case.n + case.k + case.rank)
    groups, rows = len(case.sizes), sum(case.sizes)
    depth, columns = (case.k, case.n) if case.layout is Layout.NT else (case.n, case.k)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    def with_tail(values: Tensor) -> Tensor:
        values[rows:] = math.nan
        return values.to(device)

    data = torch.randint(256, (groups, case.n, case.k // 2), generator=random, dtype=torch.uint8)
    scales = torch.randint(118, 132, (groups, case.n, case.k // 32), generator=random, dtype=torch.uint8)
    product = GroupedGemm(
        case.layout,
        with_tail(draw(rows + case.tail, depth).bfloat16()),
        data.to(device),
        torch.tensor(case.sizes, dtype=case.index, device=device),
        torch.full((rows + case.tail, columns), math.nan, dtype=torch.bfloat16, device=device),
    )
    if case.bias is not None:
        product.bias = (draw(groups, columns) * 10).to(case.bias).to(device)
    if case.factors:
        product.row_scale, product.bias_scale = (with_tail(draw(rows + case.tail).abs() + 0.5) for _ in range(2))
    if case.rank:
        second = (columns, case.rank) if case.layout is Layout.NT else (case.rank, columns)
        a, b = with_tail(draw(rows + case.tail, case.rank).bfloat16()), draw(groups, *second).bfloat16().to(device)
        product.second = OperandPair(a, b)
    return StoredGemm(product, scales.view(torch.float8_e8m0fnu).to(device))


def decoded(problem: StoredGemm) -> Tensor:
    """The values in bfloat16, as float64 [E, N, K] on the CPU."""
    assert isinstance(problem.product.b, Tensor)
    values = stored_formats.values(MXFP4(), Weight(problem.product.b.cpu(), problem.scales.cpu()))
    return values.bfloat16().double()


def _truth(problem: StoredGemm, case: Case) -> tuple[Tensor, Tensor]:
    """The result in float64, and that of the magnitudes of all operands."""
    p, rows = problem.product, sum(case.sizes)
    truth, magnitude = _products(p.a, decoded(problem), case)
    if p.second is not None:
        sums = zip((truth, magnitude), _products(p.second.a, p.second.b.double().cpu(), case), strict=True)
        truth, magnitude = (first + second for first, second in sums)
    group = torch.arange(p.groups).repeat_interleave(torch.tensor(case.sizes))
    if p.bias is not None:
        assert isinstance(p.bias, Tensor)
        scale = 1.0 if p.bias_scale is None else p.bias_scale[:rows].double().cpu()[:, None]
        bias = p.bias.double().cpu()[group]
        truth, magnitude = truth + bias * scale, magnitude + bias.abs() * scale
    if p.row_scale is not None:
        scale = p.row_scale[:rows].double().cpu()[:, None]
        truth, magnitude = truth * scale, magnitude * scale
    return truth, magnitude


def _products(rows: Tensor, weight: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    weight = weight.mT if case.layout is Layout.NT else weight
    parts = list(zip(rows[: sum(case.sizes)].double().cpu().split(case.sizes), weight, strict=True))
    return torch.cat([x @ w for x, w in parts]), torch.cat([x.abs() @ w.abs() for x, w in parts])


def check_every_value(device: str, layout: Layout) -> None:
    """Each code under each scale that gives numbers, read by rows that have a single one."""
    problem = make(device, Case(layout, sizes=(256 if layout is Layout.NN else 64,), n=256, k=64, tail=0))
    p = problem.product
    assert isinstance(p.b, Tensor)
    problem.scales.view(torch.uint8).copy_(torch.arange(256, dtype=torch.uint8).clamp(max=252).view(1, 256, 1))
    p.a = torch.eye(p.a.shape[1], device=device).bfloat16()
    hopper.run(problem)
    synchronize(device)
    assert isinstance(p.out, Tensor)
    found = p.out.mT if layout is Layout.NT else p.out
    assert torch.equal(found.double().cpu(), decoded(problem)[0])


def check_scales(device: str, layout: Layout, byte: int) -> None:
    """A single scale among others, of a weight whose other rows are as before."""
    problem = make(device, Case(layout, sizes=(20, 33), tail=0))
    p = problem.product
    assert isinstance(p.out, Tensor)
    hopper.run(problem)
    synchronize(device)
    clean = p.out.clone()
    problem.scales.view(torch.uint8)[1, 7, 2] = byte
    hopper.run(problem)
    synchronize(device)
    truth, magnitude = _truth(problem, Case(layout, sizes=(20, 33)))
    touched = torch.zeros(p.out.shape, dtype=torch.bool)
    touched[20:, 7 if layout is Layout.NT else slice(64, 96)] = True
    found = p.out.cpu()
    assert torch.equal(bits(found[~touched]), bits(clean.cpu()[~touched]))
    if byte == 255:
        assert found[touched].isnan().all()
        return
    inside = touched & (magnitude < torch.finfo(torch.bfloat16).max)
    error = (found.double() - truth).abs()[inside]
    assert (error <= (ACCUMULATION * magnitude + HALF_STEP[torch.bfloat16] * truth.abs())[inside]).all()
    assert not found[touched & ~truth.isfinite()].isfinite().any()


def check_experts(kernels: Kernels, backend: str) -> None:
    """Experts that stay in MXFP4, and the gradient of their input: those of another backend, which decodes first."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": kernels.device}
    linears = GroupedLinear(2, 128, 256, **options), SwiGLU(), GroupedLinear(2, 128, 128, **options)
    model = fusible.quantize_(fusible.Sequential(*linears), MXFP4())
    x, dy = torch.randn(2, 75, 128, device=kernels.device).bfloat16()
    sizes = torch.tensor([30, 40], device=kernels.device)

    def results(model: Any) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = model(leaf, split_sizes=sizes.clone())
        return y.detach(), torch.autograd.grad(y, leaf, dy)[0]

    with kernels.installed(), noted(STORED) as solved:
        found = results(copy.deepcopy(model))
    with fusible.config(backend=backend):
        expected = results(model)
    assert len(solved) == 4
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() < 0.02 * other.float().norm()
        assert not one[70:].any()
