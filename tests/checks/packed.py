"""Checks of products of packed weights against float64, on a GPU or its emulation.

What must not be read is NaN: rows of the tail. What must not be written is checked bit by bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from kernels_asked import noted
from torch import Tensor

import fusible
from fusible import GroupedLinear, check_device_errors
from fusible.ops.formats import mxfp4, mxfp8, nvfp4
from fusible.ops.formats.copies import PackedFormat
from fusible.ops.formats.formats import pack
from fusible.ops.formats.packed import new_unpacked, unpack_into
from fusible.ops.formats.recipe import Recipe
from fusible.ops.kernels.hopper import packed_gemm as hopper
from fusible.ops.kernels.problems.kinds import PACKED
from fusible.ops.kernels.problems.quantized import PackedGemm

from .device import synchronize
from .recipes import Kernels, activation_bound
from .scaled import HALF_STEP, bits

QUANTISERS: dict[PackedFormat, Callable[[Tensor], tuple[Tensor, ...]]] = {
    PackedFormat.MXFP8: mxfp8.quantize_rows,
    PackedFormat.MXFP4: mxfp4.quantize_weight,
    PackedFormat.NVFP4: nvfp4.quantize_weight,
}

ACCUMULATION = 1e-5
"""Of the sum of |a| |b|: what sums in float32 lose, at most."""


@dataclass(frozen=True)
class Case:
    """One problem: static shapes, the sizes of the groups, and what is asked for."""

    format: PackedFormat
    sizes: tuple[int, ...] = (3, 0, 1, 37, 8)
    n: int = 72
    k: int = 96
    tail: int = 5
    out_dtype: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None
    factors: bool = False  # of rows, of the bias in each row, and of groups
    index: torch.dtype = torch.int32


def unpacked(data: Tensor, scales: Tensor, format: PackedFormat) -> Tensor:
    """bfloat16 [E, N, K], but for the factors of groups."""
    out = new_unpacked(data, format)
    unpack_into(out, data, scales, format)
    return out


def check(device: str, case: Case) -> None:
    """One product, in every element."""
    problem = make(device, case)
    truth, magnitude = _truth(problem, case)
    untouched, rows = problem.out.clone(), sum(case.sizes)
    assert truth.abs().max() < torch.finfo(case.out_dtype).max, "a sum that the result cannot hold"
    assert hopper.refusal(problem) is None
    hopper.run(problem)
    synchronize(device)
    check_device_errors()
    assert torch.equal(bits(problem.out[rows:]), bits(untouched[rows:])), "the tail was written"
    error = (problem.out[:rows].double() - truth).abs()
    allowed = ACCUMULATION * magnitude + HALF_STEP[case.out_dtype] * truth.abs()
    assert not error.isnan().any(), "NaN in the result"
    assert (error <= allowed).all(), f"{case}: off by {float((error - allowed).max())}"
    hopper.run(replace(problem, fresh=True))
    synchronize(device)
    assert not problem.out[rows:].any(), "the tail is not zero"


def make(device: str, case: Case) -> PackedGemm:
    """Random rows, with NaN in the tail, and weights of magnitudes that differ from block to block, up to 16.

    Larger ones would be sums that float16 does not hold.
    """
    random = torch.Generator(device).manual_seed(case.n + case.k)
    groups, rows = len(case.sizes), sum(case.sizes)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=device)

    x = draw(rows + case.tail, case.k).bfloat16() / 16  # NVFP4's values, without their factor, are up to 2688
    x[rows:] = math.nan
    magnitude = torch.exp2((draw(groups, case.n, case.k // 16) * 3).clamp(max=4)).repeat_interleave(16, -1)
    weight = draw(groups, case.n, case.k) * magnitude
    data, scales, *_ = QUANTISERS[case.format](weight.bfloat16())
    of_rows = torch.full((2, rows + case.tail), math.nan, device=device)
    of_rows[:, :rows] = draw(2, rows).abs() + 0.5
    return PackedGemm(
        a=x,
        data=data.contiguous(),
        scales=scales.contiguous(),
        format=case.format,
        split_sizes=torch.tensor(case.sizes, dtype=case.index, device=device),
        out=torch.full((rows + case.tail, case.n), math.nan, dtype=case.out_dtype, device=device),
        bias=None if case.bias is None else (draw(groups, case.n) * 10).to(case.bias),
        row_scale=of_rows[0] if case.factors else None,
        bias_scale=of_rows[1] if case.factors else None,
        alpha=draw(groups).abs() + 0.5 if case.factors else None,
    )


def _truth(p: PackedGemm, case: Case) -> tuple[Tensor, Tensor]:
    """The result in float64, and that of the magnitudes of all operands."""
    values, rows = unpacked(p.data, p.scales, p.format).double(), sum(case.sizes)
    group = torch.arange(p.groups, device=p.a.device).repeat_interleave(p.split_sizes.long())
    parts = zip(p.a[:rows].double().split(case.sizes), values, strict=True)
    products = [(x @ w.mT, x.abs() @ w.abs().mT) for x, w in parts]
    truth, magnitude = (torch.cat(each) for each in zip(*products, strict=True))
    if p.alpha is not None:
        truth, magnitude = (each * p.alpha.double()[group, None] for each in (truth, magnitude))
    if p.bias is not None:
        scale = 1.0 if p.bias_scale is None else p.bias_scale[:rows].double()[:, None]
        truth, magnitude = truth + p.bias[group].double() * scale, magnitude + p.bias[group].double().abs() * scale
    if p.row_scale is not None:
        truth, magnitude = (each * p.row_scale[:rows].double()[:, None] for each in (truth, magnitude))
    return truth, magnitude


def check_every_value(device: str, format: PackedFormat) -> None:
    """Each byte under each scale, read by rows that have a single one."""
    data, scales = _EVERY[format]()
    _, n, k = (*data.shape[:2], data.shape[2] * (1 if format is PackedFormat.MXFP8 else 2))
    problem = PackedGemm(
        a=torch.eye(k, device=device).bfloat16(),
        data=data.to(device),
        scales=scales.to(device),
        format=format,
        split_sizes=torch.tensor([k], device=device),
        out=torch.full((k, n), math.nan, device=device),
    )
    hopper.run(problem)
    synchronize(device)
    want = unpacked(problem.data, problem.scales, format)[0].mT.float()
    assert torch.equal(problem.out, want)


def _every_mx() -> tuple[Tensor, Tensor]:
    """All bytes but NaN, a row for each exponent."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[0x7F], codes[0xFF] = 0, 0x80
    exponents = torch.arange(10, 240, dtype=torch.uint8)
    scales = exponents.view(1, -1, 1).expand(1, -1, 8).contiguous().view(torch.float8_e8m0fnu)
    return codes.expand(1, len(exponents), -1).contiguous().view(torch.float8_e4m3fn), scales


def _every_mxfp4() -> tuple[Tensor, Tensor]:
    """All codes, twice in a row, a row for each exponent."""
    codes = pack(torch.arange(32, dtype=torch.uint8) % 16)
    exponents = torch.arange(1, 253, dtype=torch.uint8)
    scales = exponents.view(1, -1, 1).view(torch.float8_e8m0fnu)
    return codes.expand(1, len(exponents), -1).contiguous(), scales


def _every_nv() -> tuple[Tensor, Tensor]:
    """All codes, twice in a row, a row for each scale that is a number; the two blocks have different ones."""
    codes = pack(torch.arange(32, dtype=torch.uint8) % 16)
    numbers = torch.arange(0x7F, dtype=torch.uint8)
    scales = torch.stack((numbers, numbers.flip(0)), -1).unsqueeze(0).view(torch.float8_e4m3fn)
    return codes.expand(1, len(numbers), -1).contiguous(), scales.contiguous()


_EVERY = {PackedFormat.MXFP8: _every_mx, PackedFormat.MXFP4: _every_mxfp4, PackedFormat.NVFP4: _every_nv}


def check_experts(kernels: Kernels, recipe: Recipe, backend: str) -> None:
    """Experts that stay quantised agree for few rows with another backend, which dequantises their weights.

    Another rounding of a pre-activation occasionally changes a byte of the activation.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "device": kernels.device}
    first, second = GroupedLinear(4, 512, 768, **options), GroupedLinear(4, 384, 512, **options)
    model = fusible.quantize_(fusible.Sequential(first, fusible.SwiGLU(), second), recipe)
    x = torch.randn(12, 512, device=kernels.device).bfloat16()
    sizes = torch.tensor([5, 0, 1, 4], device=kernels.device)
    with torch.no_grad():
        with (
            kernels.installed(),
            noted(PACKED) as solved,
        ):
            y = copy.deepcopy(model)(x.clone(), split_sizes=sizes.clone())
        with fusible.config(backend=backend):
            expected = model(x, split_sizes=sizes)

    assert len(solved) == 2
    assert (y.float() - expected.float()).norm() < activation_bound(recipe) * expected.float().norm()
    assert not y[10:].any()


def check_nan(device: str, format: PackedFormat) -> None:
    """A scale that is NaN, or a byte of e4m3, reaches its own column of its own group alone."""
    problem = make(device, Case(format, sizes=(5, 9), tail=0))
    hopper.run(problem)
    synchronize(device)
    clean = problem.out.clone()
    problem.scales.view(torch.uint8)[1, 7, 2] = 0x7F if format is PackedFormat.NVFP4 else 0xFF
    if format is PackedFormat.MXFP8:
        problem.data.view(torch.uint8)[1, 20, 33] = 0x7F
    hopper.run(problem)
    synchronize(device)
    columns = [7, 20] if format is PackedFormat.MXFP8 else [7]
    assert problem.out[5:, columns].isnan().all()
    problem.out[5:, columns] = clean[5:, columns]
    assert torch.equal(bits(problem.out), bits(clean))
