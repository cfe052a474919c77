"""Numbers of columns, which are one tensor for each group of rows or for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def stacked(vectors: Sequence[Tensor]) -> Tensor:
    """[K, groups, C] of K [groups, C], in one dtype; no copy of a single one."""
    if len(vectors) == 1:
        return vectors[0].unsqueeze(0)
    dtype = stacked_dtype([vector.dtype for vector in vectors])
    return torch.stack([vector.to(dtype) for vector in vectors])


def stacked_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """That of a single one; of several, one that holds them all, and no less than float32."""
    return dtypes[0] if len(dtypes) == 1 else reduce(torch.promote_types, dtypes, torch.float32)


def of_rows(vectors: Tensor, split_sizes: Tensor | None, rows: int) -> Tensor:
    """[K, rows, C]: what each row reads of ``vectors`` [K, groups, C]; zeros past the last group."""
    if split_sizes is None:
        return vectors.expand(-1, rows, -1)
    past_the_last = vectors.new_zeros((vectors.shape[0], 1, vectors.shape[2]))
    return torch.cat([vectors, past_the_last], 1)[:, _group_of_rows(split_sizes, rows)]


def sums(by_row: Tensor, split_sizes: Tensor | None) -> Tensor:
    """[K, groups, C]: the sums of [K, rows, C] over the rows of each group, or over all."""
    if split_sizes is None:
        return by_row.sum(1, keepdim=True)
    count, rows, columns = by_row.shape
    zeros = by_row.new_zeros((count, split_sizes.shape[0] + 1, columns))
    return zeros.index_add_(1, _group_of_rows(split_sizes, rows), by_row)[:, :-1]


def _group_of_rows(split_sizes: Tensor, rows: int) -> Tensor:
    """The number of each row's group; that of groups for a row past the last one."""
    return torch.searchsorted(split_sizes.cumsum(0), torch.arange(rows, device=split_sizes.device), right=True)
