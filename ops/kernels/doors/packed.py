"""The door to products of rows and weights that stay in 8 or 4 bits: few rows read them as they lie.

Where our own kernel does not take a problem, the weights are decoded and multiplied in 16 bits. Both are the
same product, up to the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....fuser.contract import tracing as trace
from ...formats.copies import PackedFormat
from .. import dispatch
from ..operators.custom_ops import kernel
from ..problems.gemm import NO_TERMS, GroupedGemm, Layout, Terms, stacked
from ..problems.quantized import PackedGemm, StoredGemm
from .decoding import multiply_unpacked
from .stored import rows_refusal


def new_packed_product(a: Tensor, data: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Memory for a product."""
    return a.new_empty((a.shape[0], data.shape[1]), dtype=out_dtype)


@kernel(new_packed_product, only_without_out=("out_dtype",), spread={"terms": ("bias", "bias_scale", "row_scale")})
def packed_gemm(
    a: Tensor,
    data: Tensor,
    scales: Tensor,
    split_sizes: Tensor,
    format: PackedFormat,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    terms: Terms = NO_TERMS,
) -> Tensor:
    """``row_scale * (alpha * A W^T + bias_scale * bias)`` by group, for bfloat16 rows; see :class:`PackedGemm`.

    Args:
        data, scales: the bytes and scales of the weight, as a recipe stores them.
        out: where to write; rows past the last group stay as they are.
        out_dtype: the dtype of an allocated result; by default ``a``'s.
        terms: the bias and the factors of rows.
    """
    fresh = out is None
    if out is None:
        out = new_packed_product(a, data, out_dtype)
    vectors, factors = None if terms.bias is None else stacked(terms.bias), (terms.row_scale, alpha, terms.bias_scale)
    problem = PackedGemm(a, data, scales, format, split_sizes, out, vectors, *factors, fresh)
    choice = dispatch.choose(problem, trace.active())
    if choice.is_fallback:
        return out if _is_decoded_within(problem) else _multiply_in_16_bits(problem, choice.words)
    dispatch.solve(problem, choice)
    return out


def _is_decoded_within(p: PackedGemm) -> bool:
    """Solves the problem by the kernel for many rows, if that takes it."""
    if p.format is not PackedFormat.MXFP4 or rows_refusal(p.a, p.data) is not None:
        return False
    terms = p.alpha, None, p.bias, p.bias_scale, p.row_scale
    product = GroupedGemm(Layout.NT, p.a, p.data, p.split_sizes, p.out, *terms, p.fresh)
    return dispatch.is_solved(StoredGemm(product, p.scales))


def _multiply_in_16_bits(p: PackedGemm, why: str) -> Tensor:
    if p.a.is_cuda:
        trace.note(f"the weights are dequantised: {why}")
    into: dict[str, Any] = {"out_dtype": p.out.dtype} if p.fresh else {"out": p.out}
    terms = Terms(p.alpha, None, p.bias, p.bias_scale, p.row_scale)
    return multiply_unpacked(Layout.NT, p.a, p.data, p.scales, p.split_sizes, p.format, terms=terms, **into)
