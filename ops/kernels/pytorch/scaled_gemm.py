"""Products of quantised operands in PyTorch, on any device: dequantised to float32, multiplied group by group.

The bytes times their scales are exact in float32 if scales are powers of two, and rounded once if they are not. Sizes
of groups are read on the host.
"""

from __future__ import annotations

from torch import Tensor

from ...formats import reference
from ...formats.copies import BlockedColumns, QuantizedRows, ceil_blocks
from ..architecture import is_capturing
from ..problems.quantized import Multiplying, ScaledGemm, ScaledWgrad
from . import loop

NAME = "loop"


def refusal(problem: Multiplying) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    captured = is_capturing(problem.a.data.device)
    return "reads split sizes on the host, which a CUDA graph cannot" if captured else None


def run(problem: Multiplying) -> None:
    """Computes ``problem.out``."""
    if isinstance(problem, ScaledGemm):
        _multiply_rows(problem)
    else:
        _multiply_columns(problem)


def _multiply_rows(p: ScaledGemm) -> None:
    """Rows past the last group become zero if ``out`` is fresh."""
    end = 0
    for group, (start, end) in enumerate(loop.row_bounds(p.split_sizes, p.rows)):
        if start < end:
            rows = slice(start, end)
            a = reference.dequantize_rows(QuantizedRows(p.a.data[rows], p.a.scales[..., rows]))
            loop.multiply(
                a,
                _weight_of(p, group).t(),
                p.out[rows],
                alpha=None if p.alpha is None else p.alpha[group],
                bias=None if p.bias is None else p.bias[group],
                bias_scale=None if p.bias_scale is None else p.bias_scale[rows],
                row_scale=None if p.row_scale is None else p.row_scale[rows],
            )
    if p.fresh:
        p.out[end:].zero_()


def _weight_of(p: ScaledGemm, group: int) -> Tensor:
    """The matrix [N, K] of a group, float32."""
    weight = p.weight[group : group + 1]
    scales = reference.weight_scales(p.weight_scales[group : group + 1], weight.shape, p.halves)
    return (weight.float() * scales)[0]


def _multiply_columns(p: ScaledWgrad) -> None:
    first_block = 0
    for group, (start, end) in enumerate(loop.row_bounds(p.split_sizes, p.rows)):
        blocks = slice(first_block, first_block + ceil_blocks(end - start))
        first_block, out = blocks.stop, p.out[group]
        if start < end:
            a, b = _tokens_of(p.a, blocks), _tokens_of(p.b, blocks)
            loop.multiply(a, b.t(), out, beta=1.0 if p.accumulate else None)
        elif not p.accumulate:
            out.zero_()


def _tokens_of(columns: BlockedColumns, blocks: slice) -> Tensor:
    """The tokens of some blocks side by side, float32 [K, tokens]."""
    part = reference.dequantize_columns(BlockedColumns(columns.data[blocks], columns.scales[blocks]))
    return part.transpose(0, 1).flatten(1)
