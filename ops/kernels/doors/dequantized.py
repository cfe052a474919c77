"""Products of quantised operands as products of 16 bits: on a GPU whose kernels do not multiply the bytes.

The values of e4m3 and e5m2 are exact in bfloat16, and stay so under scales that are powers of two. Under others they
are rounded once more. Nothing waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from ...formats import reference
from ...formats.copies import BLOCK, Columns
from .. import grouped_gemm
from ..problems.gemm import ADDED, NO_TERMS, Layout, Terms
from ..problems.quantized import Multiplying, ScaledGemm, ScaledWgrad


def multiply(problem: Multiplying) -> None:
    """Computes ``problem.out``; rows past the last group stay as they are."""
    if isinstance(problem, ScaledGemm):
        _multiply_rows(problem)
    else:
        _multiply_columns(problem)


def _multiply_rows(p: ScaledGemm) -> None:
    a = reference.dequantize_rows(p.a).bfloat16()
    terms = Terms(p.alpha, None, p.bias, p.bias_scale, p.row_scale)
    grouped_gemm(Layout.NT, a, _weight(p), p.split_sizes, out=p.out, terms=terms)


def _weight(p: ScaledGemm) -> Tensor:
    """bfloat16 [E, N, K]."""
    return (p.weight.float() * reference.weight_scales(p.weight_scales, p.weight.shape, p.halves)).bfloat16()


def _multiply_columns(p: ScaledWgrad) -> None:
    """Multiplies whole blocks, which zeros fill up."""
    sizes = _filled_up(p.split_sizes)
    out = p.out if isinstance(p.out, Tensor) else list(p.out)
    terms = ADDED if p.accumulate else NO_TERMS
    grouped_gemm(Layout.TN, _tokens(p.a), _tokens(p.b), sizes, out=out, terms=terms)


def _filled_up(split_sizes: Tensor) -> Tensor:
    """The tokens of each group with those that fill its last block."""
    return (split_sizes.clamp(min=0) + BLOCK - 1) // BLOCK * BLOCK


def _tokens(columns: Columns) -> Tensor:
    """bfloat16 [blocks * 128, K]."""
    values: Tensor = reference.dequantize_columns(columns).bfloat16()
    return values.transpose(1, 2).flatten(0, 1).contiguous()  # of one block it would be a view
