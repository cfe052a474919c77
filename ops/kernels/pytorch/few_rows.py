"""Bias operations on few rows on a CPU: one operation over all rows, given their groups, rather than one per group."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problems.gemm import Matrices, stacked

FEW, FEW_BYTES = 512, 2 << 20
"""So many rows, or so many bytes of them, stay in the cache from one operation over all of them to the next."""
_GROUPS_PER_ROW = 4


def are_few(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether an operation over all rows is faster than a loop over groups."""
    return rows <= FEW or rows * columns * dtype.itemsize <= FEW_BYTES


def leave_most_groups_empty(rows: int, groups: int) -> bool:
    """Whether a loop over the groups that have rows is faster than ``grouped_mm``.

    That takes 1 µs for a group without rows, and as many to zero its gradient.
    """
    return rows * _GROUPS_PER_ROW < groups


def groups_of(sizes: list[int]) -> Tensor:
    """int64: the group of each row, but for the tail's."""
    return torch.repeat_interleave(torch.tensor(sizes, device="cpu"))


def add_vectors(rows: Tensor, vectors: Matrices, group_of_row: Tensor) -> None:
    """Adds to each row its group's vector."""
    rows.add_(stacked(vectors).index_select(0, group_of_row))


def column_sums(rows: Tensor, group_of_row: Tensor, groups: int, scale: Tensor | None) -> Tensor:
    """The sums [groups, N] of each group's rows [T, N] times their scale [T], in at least float32."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    wide = wide if scale is None else wide * scale.unsqueeze(-1)
    return wide.new_zeros(groups, rows.shape[1]).index_add_(0, group_of_row, wide)


def row_dots(rows: Tensor, vectors: Matrices, group_of_row: Tensor) -> Tensor:
    """The dot product of each row with its group's vector, [T], in at least float32."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide) * stacked(vectors).index_select(0, group_of_row)).sum(-1)
