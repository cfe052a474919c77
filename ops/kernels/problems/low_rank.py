"""The statement of a pass of low rank over rows sorted by group, as the door hands it to a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from .gemm import Counted, Layout, SourceRows


class LowRank(NamedTuple):
    """The results of a pass; None for unwanted ones.

    Attributes:
        rows: [T, C], gathered.
        product: [T, R], the product of rows and factor; its tail is arbitrary.
        gradient: the gradient of a factor, in its shape: over the rows of each group, the sum of row times ``low``.
    """

    rows: Tensor | None
    product: Tensor | None
    gradient: Tensor | None


def rank_of(layout: Layout, factor: Tensor) -> int:
    """R of a factor [E, R, C] (NT) or [E, C, R] (NN)."""
    return factor.shape[1 if layout is Layout.NT else 2]


@final
@dataclass(slots=True)
class LowRankPass(SourceRows, Counted):
    """One pass over rows for all results of an adapter of rank R.

    Attributes:
        layout: NT: factors are [E, R, C], NN: [E, C, R].
        x: the rows [T, C], sorted by group; or tokens, of which they are gathered.
        split_sizes: [E].
        slot_of_row: [T]: row t is row ``slot_of_row[t] // top_k`` of ``x``; None: row t.
        factor: the factor of ``out.product``.
        low: [T, R], the rows of ``out.gradient``'s other operand.
        gradient_dtype: the dtype of ``out.gradient``; None: that of ``x``.
        want_rows: whether ``out.rows`` are wanted.
    """

    layout: Layout
    x: Tensor
    split_sizes: Tensor
    slot_of_row: Tensor | None
    top_k: int
    factor: Tensor | None
    low: Tensor | None
    gradient_dtype: torch.dtype | None
    want_rows: bool
    out: LowRank

    @property
    def rank(self) -> int:
        """The rank R; 0 if rows are only gathered."""
        if self.low is not None:
            return self.low.shape[1]
        return 0 if self.factor is None else rank_of(self.layout, self.factor)

    @property
    def kind(self) -> str:
        """The results of the pass, in words."""
        parts = {
            "gathered": self.slot_of_row is not None,
            "rows": self.want_rows,
            "product": self.factor is not None,
            "gradient": self.low is not None,
        }
        return " ".join(part for part, wanted in parts.items() if wanted)

    @property
    def flops(self) -> int:
        """The operations of the products."""
        products = (self.factor is not None) + (self.low is not None)
        return 2 * products * self.tokens * self.x.shape[1] * self.rank
