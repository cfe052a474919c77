"""Products of quantised operands in PyTorch, on any device: dequantised to float32, multiplied group by group.

The bytes times their scales are exact in float32 if scales are powers of two, and rounded once if they are not. Sizes
of groups are read on the host.
"""

from __future__ import annotations

from torch import Tensor

from ...formats import reference
from ...formats.copies import Columns, Rows, ceil_blocks
from ..architecture import is_capturing
from ..problems.quantized import Multiplying, ScaledGemm, ScaledWgrad
from . import loop

NAME = "loop"


def refusal(problem: Multiplying) -> str | None:
    """The reason why the problem cannot be solved here, or None."""
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
    end, scales = 0, p.a.scales
    assert scales is not None
    for group, (start, end) in enumerate(loop.row_bounds(p.split_sizes, p.rows)):
        if start < end:
            rows = slice(start, end)
            a = reference.dequantize_rows(Rows(p.a.data[rows], scales[..., rows]))
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


def _tokens_of(columns: Columns, blocks: slice) -> Tensor:
    """The tokens of some blocks side by side, float32 [K, tokens]."""
    assert columns.scales is not None
    part = reference.dequantize_columns(Columns(columns.data[blocks], columns.scales[blocks]))
    return part.transpose(0, 1).flatten(1)
