"""The door to the passes of a low-rank adapter over rows: by one kernel of ours, or by a gather and products.

Each kind of pass is chosen separately, as its results decide which way is faster: see :data:`PASSES`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....fuser.contract import tracing as trace
from ... import kernels
from .. import Layout, Terms, dispatch
from ..operators.custom_ops import kernel
from ..problems.low_rank import LowRank, LowRankPass, rank_of
from .routing import Routing, permute

__all__ = ["ALL_PASSES", "PASSES", "LowRank", "low_rank_pass"]

ALL_PASSES = frozenset(
    {
        "product",
        "gradient",
        "product gradient",
        "gathered rows product",
        "gathered gradient",
        "gathered rows gradient",
        "gathered rows product gradient",
    }
)
"""The kinds of passes over the rows of an adapter: :attr:`LowRankPass.kind`."""

PASSES = ALL_PASSES - {"product", "gradient"}
"""The kinds for which one kernel is faster than a gather and products."""


class WantedOfPass(NamedTuple):
    """The operands of the wanted results of a pass, as :class:`LowRankPass` has them; None for unwanted ones."""

    factor: Tensor | None
    low: Tensor | None
    gradient_dtype: torch.dtype | None
    want_rows: bool


def low_rank_pass(
    x: Tensor,
    layout: Layout,
    split_sizes: Tensor,
    *,
    routing: Routing | None = None,
    factor: Tensor | None = None,
    low: Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
    want_rows: bool = False,
) -> LowRank:
    """The wanted results of a pass over rows ``x`` [T, C], sorted by group, or gathered from the tokens ``x``.

    Args:
        layout: NT: factors are [E, R, C], NN: [E, C, R].
        routing: the routing by which rows are gathered.
        factor: if given, its product with the rows is wanted.
        low: [T, R]: the gradient of a factor is wanted, over the rows of each group the sum of row times ``low``.
        gradient_dtype: that of ``x`` by default.
        want_rows: whether the gathered rows are wanted.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    slots, top_k = (None, 1) if routing is None else (routing.slot_of_row, routing.row_of_slot.shape[1])
    wanted = WantedOfPass(factor, low, gradient_dtype, want_rows)
    if factor is not None or low is not None:
        p = LowRankPass(layout, x, split_sizes, slots, top_k, *wanted, out=_NOTHING)
        if p.kind in PASSES and not dispatch.choose(p, trace.active()).is_fallback:
            return one_pass(x, layout, split_sizes, slots, top_k, wanted)
    rows = x if routing is None else permute(x, routing, fill=False)
    return _by_products(rows, layout, split_sizes, wanted)


_NOTHING = LowRank(None, None, None)


def _new_low_rank(
    x: Tensor, layout: Layout, split_sizes: Tensor, slot_of_row: Tensor | None, wanted: WantedOfPass
) -> LowRank:
    (rows, columns), low = ((x if slot_of_row is None else slot_of_row).shape[0], x.shape[1]), wanted.low
    gathered = x.new_empty(rows, columns) if wanted.want_rows else None
    product = None if wanted.factor is None else x.new_empty(rows, rank_of(layout, wanted.factor))
    if low is None:
        return LowRank(gathered, product, None)
    shape = (low.shape[1], columns) if layout is Layout.NT else (columns, low.shape[1])
    return LowRank(gathered, product, x.new_empty(split_sizes.shape[0], *shape, dtype=wanted.gradient_dtype))


@kernel(_new_low_rank, name="low_rank_pass", obeys_switches=False, spread={"wanted": WantedOfPass._fields})
def one_pass(
    x: Tensor,
    layout: Layout,
    split_sizes: Tensor,
    slot_of_row: Tensor | None,
    top_k: int,
    wanted: WantedOfPass,
) -> LowRank:
    """:func:`low_rank_pass` by our own kernel, with the indices of a routing that our own kernels made."""
    out = _new_low_rank(x, layout, split_sizes, slot_of_row, wanted)
    p = LowRankPass(layout, x, split_sizes, slot_of_row, top_k, *wanted, out)
    if dispatch.is_solved(p):
        return out
    # on another device than it was traced on, or under other switches
    return _by_products(p.gathered(), layout, split_sizes, wanted)


def _by_products(rows: Tensor, layout: Layout, split_sizes: Tensor, wanted: WantedOfPass) -> LowRank:
    factor, low, gradient_dtype, want_rows = wanted
    product = gradient = None
    if factor is not None:
        product = kernels.grouped_gemm(layout, rows, factor, split_sizes, terms=Terms(tail_unspecified=True))
    if low is not None:
        sides = (low, rows) if layout is Layout.NT else (rows, low)
        gradient = kernels.grouped_gemm(Layout.TN, *sides, split_sizes, out_dtype=gradient_dtype)
    assert product is None or isinstance(product, Tensor)
    assert gradient is None or isinstance(gradient, Tensor)
    return LowRank(rows if want_rows else None, product, gradient)
