"""Checks of the passes of low rank over rows, against float64, on a GPU or its emulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.ops.kernels.hopper import low_rank as kernel
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.kernels.problems.low_rank import LowRank, LowRankPass

TAIL = 5


@dataclass(frozen=True)
class Case:
    """Sizes, and what is wanted; ``top_k`` 0: the rows lie as they are."""

    layout: Layout
    sizes: tuple[int, ...]
    columns: int = 136
    rank: int = 16
    top_k: int = 0
    wants: str = "rows product gradient"
    dtype: torch.dtype = torch.bfloat16
    gradient_dtype: torch.dtype | None = None
    index: torch.dtype = torch.int32
    pitch: int = 0
    tail: int = TAIL


def problem(device: str, case: Case) -> LowRankPass:
    """Random operands, with NaN wherever nothing may be read, and poisoned results."""
    generator = torch.Generator(device).manual_seed(sum(case.sizes) + case.columns + case.rank)
    total, groups, rows = sum(case.sizes), len(case.sizes), sum(case.sizes) + case.tail

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    factor_shape = (case.rank, case.columns) if case.layout is Layout.NT else (case.columns, case.rank)
    slots, x = None, numbers(rows, case.columns + case.pitch)[:, : case.columns]
    if case.top_k:
        x = numbers(total // case.top_k + 1, case.columns + case.pitch)[:, : case.columns]
        slots = torch.randint(0, x.shape[0] * case.top_k, (rows,), generator=generator, device=device).int()
        slots[total:] = 2**30
    else:
        x[total:] = torch.nan
    low = numbers(rows, case.rank)
    low[total:] = torch.nan

    def poisoned(wanted: str, *shape: int, dtype: torch.dtype = case.dtype) -> Tensor | None:
        return torch.full(shape, torch.nan, dtype=dtype, device=device) if wanted in case.wants else None

    out = LowRank(
        poisoned("rows", rows, case.columns),
        poisoned("product", rows, case.rank),
        poisoned("gradient", groups, *factor_shape, dtype=case.gradient_dtype or case.dtype),
    )
    return LowRankPass(
        case.layout,
        x,
        torch.tensor(case.sizes, dtype=case.index, device=device),
        slots,
        max(1, case.top_k),
        None if out.product is None else numbers(groups, *factor_shape),
        None if out.gradient is None else low,
        case.gradient_dtype or case.dtype,
        out.rows is not None,
        out,
    )


def expected(p: LowRankPass, sizes: tuple[int, ...]) -> LowRank:
    """In float64, without the tail."""
    total = sum(sizes)
    rows = p.x[:total] if p.slot_of_row is None else p.x[p.slot_of_row[:total].long() // p.top_k]
    products, gradients, start = [], [], 0
    for g, size in enumerate(sizes):
        own = slice(start, start := start + size)
        if p.factor is not None:
            factor = p.factor[g].double()
            products.append(rows[own].double() @ (factor.T if p.layout is Layout.NT else factor))
        if p.low is not None:
            gradient = p.low[own].double().T @ rows[own].double()
            gradients.append(gradient if p.layout is Layout.NT else gradient.T)
    return LowRank(rows, torch.cat(products) if products else None, torch.stack(gradients) if gradients else None)


def check(device: str, case: Case) -> LowRank:
    """Values, within the rounding of the result; and that the tail is not written."""
    p = problem(device, case)
    assert (why := kernel.refusal(p)) is None, why
    kernel.run(p)
    true, total = expected(p, case.sizes), sum(case.sizes)
    for result in (p.out.rows, p.out.product):
        assert result is None or result[total:].isnan().all()
    if p.out.rows is not None:
        assert torch.equal(p.out.rows[:total], true.rows)
    if p.out.product is not None:
        _check_close(p.out.product[:total], true.product, case.columns)
    if p.out.gradient is not None:
        _check_close(p.out.gradient, true.gradient, max(case.sizes))
    return p.out


def _check_close(result: Tensor, true: Tensor | None, depth: int) -> None:
    """Sums of so many products of numbers of about 1, rounded once."""
    assert true is not None
    error, least = (result.double() - true).abs(), 4e-6 * max(1, depth) ** 0.5
    assert bool((error <= torch.finfo(result.dtype).eps * true.abs() + least).all()), error.max()


def check_same_bits(device: str, case: Case) -> None:
    """Two runs give the same bits."""
    for first, second in zip(check(device, case), check(device, case), strict=True):
        assert first is None or torch.equal(first.nan_to_num(), second.nan_to_num())


def cases(**options: Any) -> list[Case]:
    """Every combination of what may be wanted, in both layouts, of rows that lie and of gathered ones."""
    return [
        Case(layout, wants=wants, top_k=top_k, **options)
        for layout in (Layout.NT, Layout.NN)
        for wants, top_k in [
            ("product", 0),
            ("gradient", 0),
            ("product gradient", 0),
            ("rows product", 3),
            ("gradient", 3),
            ("rows product gradient", 3),
        ]
    ]
