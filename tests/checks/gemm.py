"""Checks of the grouped GEMM kernels against float64, one launch at a time, on a GPU or its emulation.

Everything that must not be read is NaN and everything that must not be written is checked bit by bit: the tail of the
token buffer, the columns between a row's end and its pitch, the rows before and after the output.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from fusible import check_device_errors, config
from fusible.ops.kernels import extension
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.hopper.operands import LAYOUTS
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout, OperandPair
from fusible.ops.kernels.triton import gemm as triton

from .device import synchronize

HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def variants(layout: Layout, wide: bool = False) -> list[int]:
    """Every tile that is built for the layout and results of 16 bits, or of 32 (``wide``); -1 is the chosen one."""
    built = extension.library()
    return [-1, *(built.FP32_OUTPUT_TILE_VARIANTS if wide else built.TILE_VARIANTS)[LAYOUTS[layout]]]


@dataclass(frozen=True)
class Case:
    """One problem: static shapes, the sizes of the groups, and what is asked for."""

    layout: Layout
    sizes: tuple[int, ...]
    k: int = 136  # for TN: rows of the result
    n: int = 200
    tail: int = 37
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    accumulate: bool = False
    bias: torch.dtype | None = None
    row_scale: bool = False
    bias_scale: bool = False
    alpha: float | str = 1.0  # "groups": one for each
    beta: float | str = 1.0  # with accumulate; "groups": one for each, 0 and 1 among them
    separate: bool = False  # weights, their gradients and biases anywhere in memory
    index: torch.dtype = torch.int32
    rank: int = 0  # depth of a second pair of operands
    pitch: int = 0  # elements between a row's end and the next
    backend: str = hopper.NAME
    variant: int = -1
    dynamic: bool = True  # tasks on demand, or a static schedule


class Problem:
    """The tensors of a case. Every view lies inside a buffer of NaN."""

    def __init__(self, device: str, case: Case) -> None:
        self.device, self.case = device, case
        generator = torch.Generator(device).manual_seed(len(case.sizes) * 1000 + case.n)
        self.starts = [sum(case.sizes[:g]) for g in range(len(case.sizes))]
        self.tokens = sum(case.sizes) + case.tail
        self.member = torch.full((self.tokens,), -1, dtype=torch.long)
        for g, (start, size) in enumerate(zip(self.starts, case.sizes, strict=True)):
            self.member[start : start + size] = g
        self.member = self.member.to(device)
        self.valid = self.member >= 0

        def view(*shape: int, dtype: torch.dtype, scale: float = 1.0, rows_are_tokens: bool = False) -> torch.Tensor:
            """Random numbers inside a buffer of NaN, with a pitch, NaN in rows of no group."""
            rows = math.prod(shape[:-1])
            buffer = torch.full((rows + 32, shape[-1] + case.pitch), math.nan, dtype=dtype, device=device)
            inner = buffer[16 : 16 + rows, : shape[-1]]
            inner.copy_(torch.randn(inner.shape, generator=generator, device=device) * scale)
            if rows_are_tokens:
                inner[~self.valid] = math.nan
            return inner.unflatten(0, shape[:-1]) if len(shape) > 2 else inner

        experts, out_dtype = len(case.sizes), case.out_dtype or case.dtype
        tokens = {"dtype": case.dtype, "rows_are_tokens": True}
        if case.layout is Layout.TN:
            self.a, self.b = view(self.tokens, case.k, **tokens), view(self.tokens, case.n, **tokens)
            self.out = view(experts, case.k, case.n, dtype=out_dtype)
        else:
            shape = (case.n, case.k) if case.layout is Layout.NT else (case.k, case.n)
            self.a = view(self.tokens, case.k, **tokens)
            self.b = view(experts, *shape, dtype=case.dtype, scale=case.k**-0.5)
            self.out = view(self.tokens, case.n, dtype=out_dtype)
        self.second = None
        if case.rank:
            shape = (case.n, case.rank) if case.layout is Layout.NT else (case.rank, case.n)
            second_b = view(experts, *shape, dtype=case.dtype, scale=case.rank**-0.5)
            self.second = OperandPair(view(self.tokens, case.rank, **tokens), second_b)
        self.bias = (
            None
            if case.bias is None
            else torch.randn(experts, case.n, generator=generator, device=device).to(case.bias)
        )
        scale = torch.rand(self.tokens, generator=generator, device=device).masked_fill(~self.valid, math.nan)
        self.row_scale = scale + 0.5 if case.row_scale else None
        self.bias_scale = (1.5 - scale) if case.bias_scale else None
        self.alphas = torch.rand(experts, generator=generator, device=device) + 0.5 if case.alpha == "groups" else None
        self.betas = self._betas(generator) if case.beta == "groups" else None
        if not case.accumulate:
            self.out.fill_(-77.0)  # a number: a tail of NaN could not be told from a NaN that was written
        self.before = self.out.clone()
        unread = self.beta_of_groups() == 0
        if case.layout is not Layout.TN:
            unread = self.valid & unread[self.member.clamp(min=0)]
        self.out[unread] = math.nan  # beta = 0 does not read
        self.given_b = anywhere(self.b) if case.separate and case.layout is not Layout.TN else self.b
        self.given_out = anywhere(self.out) if case.separate and case.layout is Layout.TN else self.out
        self.given_bias = anywhere(self.bias) if case.separate and self.bias is not None else self.bias
        self.sizes = torch.tensor(case.sizes, dtype=case.index, device=device)

    def _betas(self, generator: torch.Generator) -> torch.Tensor:
        betas = torch.rand(len(self.case.sizes), generator=generator, device=self.device) * 2 - 1
        betas[::3], betas[1::5] = 0.0, 1.0
        return betas

    def beta_of_groups(self) -> torch.Tensor:
        """The factor of the old result for each group, [E]."""
        number = self.case.beta if isinstance(self.case.beta, float) else 1.0
        return torch.full((len(self.case.sizes),), number, device=self.device) if self.betas is None else self.betas

    def result(self) -> torch.Tensor:
        """The written result; separate matrices are stacked."""
        return torch.stack(self.given_out) if isinstance(self.given_out, list) else self.given_out

    @property
    def gemm(self) -> GroupedGemm:
        """The problem as the door states it."""
        case, beta = self.case, self.betas if self.betas is not None else self.case.beta
        alpha = self.alphas if self.alphas is not None else None if case.alpha == 1.0 else case.alpha
        factors = {"alpha": alpha, "beta": beta if case.accumulate else None, "bias": self.given_bias}
        scales = {"bias_scale": self.bias_scale, "row_scale": self.row_scale}
        return GroupedGemm(case.layout, self.a, self.given_b, self.sizes, self.given_out, **factors, **scales)

    def launch(self) -> None:
        case = self.case
        if case.backend == triton.NAME:
            with config(backend=triton.NAME):
                assert triton.refusal(self.gemm) is None, triton.refusal(self.gemm)
            return triton.run(self.gemm)
        beta = self.betas if self.betas is not None else case.beta if isinstance(case.beta, float) else 1.0
        problem = GroupedGemm(
            *(case.layout, self.a, self.given_b, self.sizes, self.given_out),
            alpha=self.alphas if self.alphas is not None else case.alpha if isinstance(case.alpha, float) else 1.0,
            beta=beta if case.accumulate else None,
            bias=self.given_bias,
            bias_scale=self.bias_scale,
            row_scale=self.row_scale,
            second=self.second,
        )
        hopper.launch(problem, case.variant, case.dynamic)

    def expected(self) -> torch.Tensor:
        """In float64; rows of no group keep what stood there."""
        case, result, betas = self.case, self.before.double(), self.beta_of_groups().double()
        for g, (start, size) in enumerate(zip(self.starts, case.sizes, strict=True)):
            rows = slice(start, start + size)
            a = self.a[rows].double()
            if case.layout is Layout.TN:
                value = a.T @ self.b[rows].double()
            else:
                value = a @ (self.b[g].double().T if case.layout is Layout.NT else self.b[g].double())
            if self.second is not None:
                low, factor = self.second.a[rows].double(), self.second.b[g].double()
                value = value + low @ (factor.T if case.layout is Layout.NT else factor)
            value = value * (self.alphas[g].double() if self.alphas is not None else case.alpha)
            if self.bias is not None:
                value = value + self.bias[g].double() * (
                    1 if self.bias_scale is None else self.bias_scale[rows, None].double()
                )
            if self.row_scale is not None:
                value = value * self.row_scale[rows, None].double()
            where = g if case.layout is Layout.TN else rows
            result[where] = betas[g] * result[where] + value if case.accumulate else value
        return result

    def check(self) -> None:
        """Launches, and compares every element of the result and of its surroundings."""
        case = self.case
        outs = self.given_out if isinstance(self.given_out, list) else [self.given_out]
        surroundings = [(out, buffer_of(out), buffer_of(out).clone()) for out in outs]
        self.launch()
        synchronize(self.device)
        want, got = self.expected(), self.result().double()
        depth = max(case.sizes, default=1) if case.layout is Layout.TN else 1
        old = self.before.double().abs()
        roundings = want.abs()
        if case.accumulate:  # what stood there times beta, the product but of weight gradients, then the sum
            product = 0 if case.layout is Layout.TN else want.abs() + old
            roundings = roundings + product + (0 if case.beta == 1.0 else 2 * old)
        tolerance = roundings * HALF_STEP[self.out.dtype] * 1.02 + 1e-4 * max(1, depth) ** 0.5
        wrong = ~((got - want).abs() <= tolerance)
        worst = (got - want).abs()[wrong].max() if wrong.any() else 0
        assert not wrong.any(), f"{int(wrong.sum())} wrong, the worst off by {worst:.3g}, first at {wrong.nonzero()[0]}"
        if case.layout is not Layout.TN:
            assert torch.equal(self.out[~self.valid], self.before[~self.valid]), "wrote into rows of no group"
        bits = torch.int32 if self.out.element_size() == 4 else torch.int16  # NaN must stay the same NaN
        for out, buffer, around in surroundings:
            outside = torch.ones_like(buffer, dtype=torch.bool)
            torch.as_strided(outside, out.shape, out.stride(), out.storage_offset()).fill_(False)
            assert torch.equal(buffer.view(bits)[outside], around.view(bits)[outside]), "wrote outside the result"


def buffer_of(out: torch.Tensor) -> torch.Tensor:
    """All of the tensor whose view it is."""
    return out if out._base is None else out._base


def anywhere(stacked: torch.Tensor) -> list[torch.Tensor]:
    """The same matrices (or vectors), each in a buffer of NaN of its own, in no order and at no equal distances."""
    shuffler, places = random.Random(len(stacked)), {}
    for g in shuffler.sample(range(len(stacked)), len(stacked)):
        before, rows = 8 * shuffler.randint(1, 40), stacked[g].numel() // stacked.shape[-1]
        pitch = stacked.stride(-2) if stacked.dim() == 3 else stacked.shape[-1]
        buffer = stacked.new_full((before + rows * pitch + 8,), math.nan)
        places[g] = buffer.as_strided(stacked.shape[1:], stacked.stride()[1:], before).copy_(stacked[g])
    return [places[g] for g in range(len(stacked))]


def check(device: str, case: Case, **changes: Any) -> None:
    """With tasks on demand and in a fixed order; compares everything with float64."""
    for dynamic in (True, False):
        Problem(device, replace(case, dynamic=dynamic, **changes)).check()


def check_one_rounding(device: str, sizes: tuple[int, ...], k: int, n: int, variant: int = -1) -> None:
    """Weight gradients of 16 bits that are added to: the bits of the sum in float32, rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        problem = Problem(device, Case(Layout.TN, sizes, k=k, n=n, dtype=dtype, accumulate=True, variant=variant))
        wide = torch.empty_like(problem.out, dtype=torch.float32)
        of_wide = variant if variant in variants(Layout.TN, wide=True) else 2  # which adds in the same order
        hopper.launch(GroupedGemm(Layout.TN, problem.a, problem.b, problem.sizes, wide), of_wide)
        problem.launch()
        synchronize(device)
        assert torch.equal(problem.out, (problem.before.float() + wide).to(dtype))
        assert not torch.equal(problem.out, problem.before + wide.to(dtype)), "two roundings give the same here"


def check_split(device: str, sizes: tuple[int, ...], k: int, n: int, variant: int) -> None:
    """A depth that several blocks share: against float64; the same bits in every run; and not those of one block, which
    show that it is shared."""
    for dtype, accumulate in product((torch.bfloat16, torch.float16), (False, True)):
        case = Case(Layout.TN, sizes, k=k, n=n, dtype=dtype, accumulate=accumulate, separate=accumulate)
        check(device, replace(case, variant=variant))
    problems = [
        Problem(device, replace(case, accumulate=False, separate=False, variant=v)) for v in (variant, variant, 2)
    ]
    for problem in problems:
        problem.launch()
    synchronize(device)
    first, again, whole = (problem.out for problem in problems)
    assert torch.equal(first, again)
    assert not torch.equal(first, whole)


def check_halved(device: str, sizes: tuple[int, ...], k: int, n: int, wide: bool) -> None:
    """Tiles that may be halved against float64, and bit by bit against whole ones."""
    out_dtype = torch.float32 if wide else None
    for accumulate in (False, True):
        case = Case(Layout.TN, sizes, k=k, n=n, out_dtype=out_dtype, accumulate=accumulate)
        check(device, case)
        halved, *whole = (
            Problem(device, replace(case, variant=variant)) for variant in (-1, *variants(Layout.TN, wide))
        )
        for problem in (halved, *whole):
            problem.launch()
        assert any(torch.equal(halved.out, problem.out) for problem in whole)


def check_sizes_that_lie_stay_inside(device: str, layout: Layout) -> None:
    """Negative sizes and sums beyond the buffer are cut off: (-5, 150, 2^30, 77) of 400 rows mean (0, 150, 250, 0)."""
    problem = Problem(device, Case(layout, (0, 150, 250, 0), tail=0))
    problem.sizes = torch.tensor([-5, 150, 1 << 30, 77], dtype=torch.int32, device=device)
    problem.check()
    with pytest.raises(RuntimeError, match="the size of group 0 is -5, which is negative"):
        check_device_errors(0)
