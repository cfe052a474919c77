"""The door to quantisers of whole rows and of groups, as :mod:`.quantized` is to those of blocks.

Their copies have one scale for each row, the same in all rows of a group where that has one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...formats.copies import Scaling
from ..dispatch import run
from ..operators.custom_ops import kernel
from ..problems.gemm import Matrices, first
from ..problems.quantized import QuantizeRows, QuantizeWeight, RowWeight
from .quantized import E4M3, RowCopies, new_copies

new_whole_rows = partial(new_copies, has_whole_rows=True)


def new_whole_weight(weight: Matrices, both: bool) -> RowWeight:
    """Memory for the copies of a weight."""
    one, groups = first(weight), weight.shape[0] if isinstance(weight, Tensor) else len(weight)

    def copy(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        data = one.new_empty((groups, rows, columns), dtype=E4M3)
        return data, one.new_empty((groups, rows), dtype=torch.float32)

    n, k = one.shape[-2:]
    return RowWeight(*copy(n, k), *(copy(k, n) if both else (None, None)))


@kernel(new_whole_rows)
def quantize_whole_rows(
    x: Tensor,
    split_sizes: Tensor,
    *,
    scaling: Scaling,
    power_of_two: bool,
    want_rows: bool = True,
    want_columns: bool = False,
    encode: Tensor | None = None,
    slot_of_row: Tensor | None = None,
    top_k: int = 1,
) -> RowCopies:
    """The wanted copies of the rows of ``x`` [T, K]: scales [T] of rows; of columns [blocks, K], as their bytes lie.

    Args:
        encode: float32 [E], the factor of the values of each group; None: it is computed from the values.
        slot_of_row: as for :func:`quantize_rows`.
    """
    copies = new_whole_rows(x, split_sizes, want_rows, want_columns, slot_of_row)
    options = slot_of_row, top_k, scaling, encode
    run(QuantizeRows(x, split_sizes, power_of_two, copies.rows, copies.columns, *options))
    return copies


@kernel(new_whole_weight)
def quantize_whole_weight(
    weight: Matrices, *, scaling: Scaling, power_of_two: bool, both: bool = False, encode: Tensor | None = None
) -> RowWeight:
    """The bytes and scales of a weight [E, N, K]; ``both``: also of its transpose, which rows scale otherwise."""
    copies = new_whole_weight(weight, both)
    run(QuantizeWeight(weight, 1, power_of_two, copies, scaling, encode))
    return copies
