"""Checks of groups of any shapes against float64, one launch at a time, on a GPU or its emulation.

What lies behind the last group is NaN in the operands, and so is all around them; of the output it is compared bit by
bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from fusible import GroupedTensor, check_device_errors, config, grouped_gemm
from fusible.ops.kernels.hopper import ragged as hopper_ragged
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.kernels.problems.ragged import RaggedGemm

from .device import synchronize
from .gemm import HALF_STEP

Shapes = tuple[tuple[int, int, int], ...]  # m, n, k of each group

ALIGNED: Shapes = ((136, 264, 72), (0, 64, 64), (8, 8, 8), (64, 0, 16), (128, 256, 64), (72, 16, 0), (200, 136, 200))
ODD: Shapes = ((131, 37, 70), (5, 3, 1), (1, 300, 65), (0, 7, 9), (70, 1, 33), (3, 4, 0), (66, 129, 7), (9, 0, 5))
EVEN: Shapes = ((130, 38, 70), (6, 2, 2), (2, 300, 66), (0, 6, 10), (70, 2, 34), (4, 6, 0), (66, 130, 6), (18, 34, 130))
MIXED: Shapes = ((40, 24, 64), (3, 8, 16), (64, 72, 63), (33, 33, 33), (8, 16, 24), (129, 257, 65), (16, 8, 8))
SHAPES = {"aligned": ALIGNED, "even": EVEN, "odd": ODD, "mixed": MIXED}


@dataclass(frozen=True)
class Case:
    """One problem: the shapes of the groups, and what is asked for."""

    layout: Layout
    shapes: Shapes
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    alpha: float | str | None = None  # "groups": one for each
    beta: float | str | None = None
    bias: torch.dtype | None = None
    index: torch.dtype = torch.int64
    tail: int = 11  # elements behind the last group, where the data is flat
    shift: int = 0  # elements by which data misses a multiple of 16 bytes
    uniform: bool = False  # dims that all groups share are numbers
    fresh: bool = False
    alone: bool = False  # operands fill all of their memory: one value more would be outside


def stored(layout: Layout, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a group's a and b."""
    return (k, m) if layout is Layout.TN else (m, k), (n, k) if layout is Layout.NT else (k, n)


class Problem:
    """The tensors of a case. Their data lie inside buffers of NaN."""

    def __init__(self, device: str, case: Case, seed: int = 0) -> None:
        self.device, self.case = device, case
        self.generator = torch.Generator(device).manual_seed(seed)
        shapes_of_a, shapes_of_b = zip(*(stored(case.layout, *shape) for shape in case.shapes), strict=True)
        depth = max(k for _, _, k in case.shapes)
        self.a = self.grouped(shapes_of_a, case.dtype)
        self.b = self.grouped(shapes_of_b, case.dtype, max(1, depth) ** -0.5)
        self.shapes_of_out = [(m, n) for m, n, _ in case.shapes]
        self.out = self.grouped(self.shapes_of_out, case.out_dtype or case.dtype)
        if case.alone:
            self.a, self.b = (t.with_data(t.data.clone()) for t in (self.a, self.b))
        groups = len(case.shapes)
        self.alpha = self.numbers(groups) if case.alpha == "groups" else case.alpha
        self.beta = self.numbers(groups) if case.beta == "groups" else case.beta
        if case.beta == "groups":
            self.beta[::3], self.beta[1::5] = 0.0, 1.0
        self.bias = None if case.bias is None else self.numbers(groups, case.shapes[0][1]).to(case.bias)
        if case.beta is None:
            self.out.data.fill_(-77.0)
        self.before = self.out.data.clone()

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def grouped(self, shapes: list[tuple[int, int]], dtype: torch.dtype, scale: float = 1.0) -> GroupedTensor:
        """Random matrices one after the other; NaN before, behind and in the tail."""
        case, total = self.case, sum(rows * columns for rows, columns in shapes)
        ragged = [not case.uniform or len({shape[i] for shape in shapes}) > 1 for i in (0, 1)]
        tail = case.tail if ragged[1] else case.tail * shapes[0][1] if ragged[0] else 0
        buffer = torch.full((16 + case.shift + total + tail + 40,), math.nan, dtype=dtype, device=self.device)
        data = buffer[16 + case.shift :][: total + tail]
        data[:total] = (self.numbers(total) * scale).to(dtype)
        first, last = (
            torch.tensor([shape[i] for shape in shapes], dtype=case.index, device=self.device) if ragged[i] else None
            for i in (0, 1)
        )
        if last is not None:
            return GroupedTensor(data, first, last, rows=None if first is not None else shapes[0][0])
        return GroupedTensor(
            data.view(*((-1,) if first is not None else (len(shapes),)), *shapes[0][ragged[0] :]), first
        )

    def gemm(self) -> RaggedGemm:
        bias, fresh = self.bias, self.case.fresh
        return RaggedGemm(self.case.layout, self.a, self.b, self.out, self.alpha, self.beta, bias, fresh)

    def launch(self) -> None:
        gemm = self.gemm()
        assert hopper_ragged.refusal(gemm) is None
        hopper_ragged.run(gemm)

    def expected(self) -> torch.Tensor:
        """In float64, flat; what stood behind the last group is left, or zero if the output is fresh."""
        case, result, at = self.case, self.before.double().reshape(-1), 0
        for g, (a, b, (m, n)) in enumerate(
            zip(self.split(self.a, 0), self.split(self.b, 1), self.shapes_of_out, strict=True)
        ):
            a, b = a.double(), b.double()
            value = (a.T if case.layout is Layout.TN else a) @ (b.T if case.layout is Layout.NT else b)
            value = value * (1.0 if self.alpha is None else of(self.alpha, g))
            value = value if self.bias is None else value + self.bias[g].double()
            beta, old = of(self.beta, g) if self.beta is not None else 0.0, result[at : at + m * n].view(m, n)
            result[at : at + m * n] = (value + (beta * old if beta else 0.0)).reshape(-1)
            at += m * n
        if case.fresh:
            result[at:] = 0
        return result

    def split(self, t: GroupedTensor, which: int) -> list[torch.Tensor]:
        """By the shapes of the case, whatever the dims say."""
        shapes = [stored(self.case.layout, *shape)[which] for shape in self.case.shapes]
        parts = t.data.reshape(-1)[: sum(r * c for r, c in shapes)].split([r * c for r, c in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def check(self, launch: Callable[[], None] | None = None) -> None:
        """Launches, and compares every element of the result and of its surroundings."""
        buffer = self.out.data._base
        around = buffer.clone()
        (launch or self.launch)()
        synchronize(self.device)
        want, got = self.expected(), self.out.data.double().reshape(-1)
        used = sum(m * n for m, n in self.shapes_of_out)
        old = self.before.double().abs().reshape(-1) if self.case.beta is not None else 0.0
        tolerance = (2 * want.abs() + 6 * old) * HALF_STEP[self.out.dtype] * 1.02 + 1e-4
        wrong = ~((got - want).abs() <= tolerance)[:used]
        assert not wrong.any(), f"{int(wrong.sum())} of {used} wrong, first at {wrong.nonzero()[0]}"
        bits = torch.int32 if buffer.element_size() == 4 else torch.int16
        start = self.out.data.storage_offset()
        around[start : start + used] = buffer[start : start + used]
        if self.case.fresh:
            around[start + used : start + want.numel()] = 0
        assert torch.equal(buffer.view(bits), around.view(bits)), "wrote outside of the groups"


def of(factor: float | torch.Tensor, group: int) -> float:
    return float(factor[group]) if isinstance(factor, torch.Tensor) and factor.dim() else float(factor)


def check(device: str, case: Case, **changes: Any) -> None:
    Problem(device, replace(case, **changes)).check()


def any_shapes(groups: int, seed: int, most: tuple[int, int, int], step: int = 1) -> Shapes:
    """Random, a fifth of them empty in one way or another, some of one row or column."""
    shuffler = random.Random(seed)

    def size(limit: int) -> int:
        kind = shuffler.random()
        return 0 if kind < 0.07 else step if kind < 0.15 else shuffler.randint(0, limit // step) * step

    return tuple((size(most[0]), size(most[1]), size(most[2])) for _ in range(groups))


def check_operands_that_fill_their_memory(device: str, layout: Layout) -> None:
    for shapes in SHAPES.values():
        check(device, Case(layout, shapes, tail=0, alone=True))
        check(device, Case(layout, shapes[-1:], tail=0, alone=True))


def check_dims_that_all_groups_share(device: str, layout: Layout) -> None:
    """Any of the three may be one number; all eight ways."""
    for step in (8, 1):
        for fixed in product((False, True), repeat=3):
            free = any_shapes(6, 3, (150, 300, 90), step)
            shapes = tuple(tuple(40 + step if f else x for f, x in zip(fixed, shape, strict=True)) for shape in free)
            check(device, Case(layout, shapes, uniform=True, tail=3))


def check_nothing(device: str, layout: Layout) -> None:
    for beta in (None, 1.0):
        check(device, Case(layout, ((0, 0, 0), (0, 5, 3), (4, 0, 2)), beta=beta, tail=8))
        check(device, Case(layout, ((3, 5, 0), (8, 8, 0)), beta=beta, tail=8))


def check_dims_that_lie_stay_inside(device: str, layout: Layout) -> None:
    """A group whose operands do not fit has depth 0, one whose output does not fit is left out."""
    problem = Problem(device, Case(layout, ((16, 24, 32), (8, 16, 8), (24, 8, 16)), tail=0))
    for t, wrong in product((problem.a, problem.b, problem.out), (-3, 10**6, 2**31 - 1)):
        for dims in (t.first_dims, t.last_dims):
            kept = dims.clone()
            dims[1] = wrong
            around = problem.out.data._base.clone()
            problem.launch()
            synchronize(device)
            start, used = problem.out.data.storage_offset(), problem.out.data.numel()
            around[start : start + used] = problem.out.data
            bits = torch.int16
            assert torch.equal(problem.out.data._base.view(bits), around.view(bits))
            assert not problem.out.data.isnan().any()
            dims.copy_(kept)
            with pytest.raises(RuntimeError, match="group 1") if t is not problem.out else nullcontext():
                check_device_errors(0)
    problem.out.data.copy_(problem.before)
    problem.check()


def check_equal_shapes_give_the_bits_of_the_grouped_gemm(device: str, layout: Layout) -> None:
    m, n, k = 192, 264, 136
    problem = Problem(device, Case(layout, ((m, n, k),) * 5, uniform=True))
    problem.launch()
    a, b = problem.a.data, problem.b.data
    sizes = torch.full((5,), k if layout is Layout.TN else m, device=device)
    rows, other = a.reshape(-1, a.shape[-1]), b.reshape(-1, n) if layout is Layout.TN else b
    want = grouped_gemm(rows, other, sizes, layout=layout.value)
    assert torch.equal(problem.out.data.reshape(-1), want.reshape(-1))


def check_autograd_through_the_door(device: str, layout: Layout) -> None:
    """Values and gradients against float64; with room given, nothing waits."""
    for shapes in (ALIGNED, ODD):
        problem = Problem(device, Case(layout, shapes))
        a, b = (t.with_data(t.data.clone().requires_grad_()) for t in (problem.a, problem.b))
        size = sum(m * n for m, n, _ in shapes) + 5
        with config(backend="hopper"):
            out = grouped_gemm(a, b, layout=layout.value, alpha=0.5, out_elements=size).data
            dy = torch.randn(size, device=device).to(out.dtype)
            dy[-5:] = math.nan
            out.backward(dy)
        for tensor, tail in ((out, 5), (a.data.grad, 11), (b.data.grad, 11)):
            assert (tensor[-tail:] == 0).all()
        left, right = (
            [x.detach().double().requires_grad_() for x in problem.split(t, i)] for i, t in enumerate((a, b))
        )
        values = [
            0.5 * ((x.T if layout is Layout.TN else x) @ (y.T if layout is Layout.NT else y))
            for x, y in zip(left, right, strict=True)
        ]
        want = torch.cat([value.reshape(-1) for value in values])
        want.backward(dy[:-5].double())
        near(out[:-5], want)
        for t, parts in ((a, left), (b, right)):
            near(t.data.grad[:-11], torch.cat([x.grad.reshape(-1) for x in parts]))


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert ((got.double() - want).abs() <= want.abs() * 2.0**-8 * 1.02 + 1e-3).all()
