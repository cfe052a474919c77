"""Passes over rows that know groups, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problems.gemm import Matrices, stacked
from .installed import DTYPES, NAME, groups_refusal, launches_on, triton_refusal

__all__ = ["NAME", "column_sums", "refusal", "row_dots", "zero_tail"]


def refusal(tokens: Tensor, split_sizes: Tensor, out: Tensor) -> str | None:
    """Why the kernels do not take these rows [T, N], of any pitch; None: they do. Zeros may be of any type."""
    if (why := triton_refusal(tokens)) is not None:
        return why
    if tokens.stride(-1) != 1 and tokens.shape[-1] != 1:
        return f"needs dense rows, got strides {list(tokens.stride())}"
    if out is not tokens and (tokens.dtype not in DTYPES or out.dtype not in DTYPES):
        return f"needs rows of 16 or 32 bits, got {tokens.dtype} and {out.dtype}"
    return groups_refusal(split_sizes, tokens.shape[0])


def column_sums(rows: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """``out[g]`` = the sum of the rows of group g, each times its ``scale``, in a fixed order."""
    from .device import passes

    with launches_on(out):
        passes.column_sums(rows, split_sizes, out, None if scale is None else scale.contiguous())
    torch.autograd.graph.increment_version(out)


def row_dots(rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""
    from .device import passes

    with launches_on(out):
        passes.row_dots(rows, stacked(vectors).contiguous(), split_sizes, out)
    torch.autograd.graph.increment_version(out)


def zero_tail(out: Tensor, split_sizes: Tensor) -> None:
    """Zeros the rows past the last group."""
    from .device import passes

    with launches_on(out):
        passes.zero_tail(out, split_sizes)
