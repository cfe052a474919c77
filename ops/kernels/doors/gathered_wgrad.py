"""The gradient of a weight from rows that are gathered from tokens, some columns at a time.

A gather costs a fraction of a product. So rows of experts need not be kept for a weight's gradient, and large ones are
never all there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from .. import NO_TERMS, Layout, Matrices, Terms
from ..operators.custom_ops import kernel
from .routing import Routing, permute

SLICED_FROM = 64 << 20  # bytes of gathered rows that are not gathered whole
_SLICES, _SLICE_UNIT = 4, 128


def new_wgrad(tokens: Tensor, rows: Tensor, routing: Routing, leads: bool, out_dtype: torch.dtype | None) -> Tensor:
    """Memory for the gradient, of the dtype of ``rows`` by default."""
    sides = (tokens.shape[1], rows.shape[1]) if leads else (rows.shape[1], tokens.shape[1])
    return rows.new_empty((routing.tokens_per_expert.shape[0] - 1, *sides), dtype=out_dtype or rows.dtype)


@kernel(new_wgrad, eager_only=("out", "terms"), schema_names={"out_dtype": "dtype"})
def gathered_wgrad(
    tokens: Tensor,
    rows: Tensor,
    routing: Routing,
    leads: bool,
    *,
    out_dtype: torch.dtype | None = None,
    out: Matrices | None = None,
    terms: Terms = NO_TERMS,
) -> Matrices:
    """The product by expert of the rows of ``tokens`` [T, H], permuted, and ``rows`` [S, C].

    Args:
        leads: whether the columns of the tokens are the first of the gradient's, [E, H, C]; else [E, C, H].
        out_dtype, out, terms: as of :func:`kernels.grouped_gemm`.
    """
    if rows.shape[0] * tokens.shape[1] * tokens.element_size() <= SLICED_FROM:
        gathered = permute(tokens, routing, fill=False)
        return _product(gathered, rows, routing, leads, out=out, out_dtype=out_dtype, terms=terms)
    if out is None:
        out = new_wgrad(tokens, rows, routing, leads, out_dtype)
    for part in _slices(tokens.shape[1]):
        gathered = permute(tokens[:, part], routing, fill=False)
        _product(gathered, rows, routing, leads, out=_columns(out, part, leads), terms=terms)
        del gathered  # before the next are there
    return out


def _product(gathered: Tensor, rows: Tensor, routing: Routing, leads: bool, **options: Any) -> Matrices:
    left, right = (gathered, rows) if leads else (rows, gathered)
    return kernels.grouped_gemm(Layout.TN, left, right, routing.split_sizes, **options)


def _slices(columns: int) -> Iterator[slice]:
    """Columns that are gathered together."""
    width = -(-columns // (_SLICES * _SLICE_UNIT)) * _SLICE_UNIT
    return (slice(first, min(columns, first + width)) for first in range(0, columns, width))


def _columns(out: Matrices, part: slice, leads: bool) -> Matrices:
    """The part of a gradient, whole or by expert, that these columns of the tokens give."""
    if not isinstance(out, Tensor):
        return tuple([each[part] if leads else each[:, part] for each in out])
    return out[..., part, :] if leads else out[..., part]
