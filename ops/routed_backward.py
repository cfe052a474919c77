"""The door to the way back through the routed experts of a layer, in parts: a caller lets go of what is done with.

A traced tensor takes another way, as at the kernel door: each part is then the custom op of its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser.tracing import is_traced
from . import kernels
from . import routing as rows_of
from .kernels import Layout
from .kernels import traced_routed as traced
from .routed_mlp import Experts, oriented, product
from .routing import Routing

SLICED_FROM = 64 << 20  # bytes of gathered rows that are not gathered whole for a weight's gradient
_SLICES, _SLICE_UNIT = 4, 128


class Needs(NamedTuple):
    """Which gradients are wanted."""

    x: bool
    weights: bool
    up: bool
    down: bool
    up_bias: bool
    down_bias: bool

    @property
    def pre(self) -> bool:
        """Whether the gradient of the pre-activation is."""
        return self.x or self.up or self.up_bias

    @property
    def through(self) -> bool:
        """Whether something behind the second linear is."""
        return self.pre or self.weights


class Through(NamedTuple):
    """What the way back through the second linear and the activation gives; None: what is not wanted.

    Attributes:
        pre: the gradient of the pre-activation [S, C].
        hidden: the hidden rows [S, F], made again, times the weights of the rows.
        weights: the gradient of the weights [T, k].
        up_bias, down_bias: those of the biases, [E, C] and [E, H].
    """

    pre: Tensor | None
    hidden: Tensor | None
    weights: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


def routed_activation_backward(
    e: Experts, needs: Needs, dy: Tensor, routing: Routing, scales: Tensor, pre: Tensor | None, dtype: torch.dtype
) -> Through:
    """From the gradient of the sums, ``dy`` [T, H].

    Args:
        scales: the weights of the rows [S].
        pre: the pre-activation [S, C], unless only the gradient of the second bias is wanted.
        dtype: of the gradient of the weights.
    """
    if type(dy) is not Tensor and is_traced(dy):
        made = traced.routed_activation_backward(e, needs, dy, routing[:4], scales, pre, dtype)
        there = needs.through, needs.down, needs.weights, needs.up_bias, needs.down_bias
        return Through(*[tensor if wanted else None for tensor, wanted in zip(made, there, strict=True)])
    sizes, dweights, dbias = routing.split_sizes, None, None
    rows = rows_of.permute(dy, routing, fill=False)
    dpre, dots, hidden, dup_bias = _grads(e, needs, rows, sizes, scales, pre)
    if needs.weights:
        assert dots is not None
        if e.down_bias is not None:
            dots = dots + kernels.row_dots(rows, e.down_bias, sizes, dots.dtype)
        dweights = rows_of.by_slot(dots, routing, dtype)
    if needs.down_bias and e.down_bias is not None:
        dbias = kernels.column_sums(rows, sizes, e.down_bias.dtype, scales)
    return Through(dpre, hidden, dweights, dup_bias, dbias)


def _grads(
    e: Experts, needs: Needs, rows: Tensor, sizes: Tensor, scales: Tensor, pre: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of pre-activation and its bias, ``<u, a>`` by row, scaled hidden rows: those that are wanted."""
    if pre is None:
        return None, None, None, None
    if not needs.through:
        return None, None, kernels.activate(pre, e.spec, scales), None
    bias_dtype = e.up_bias.dtype if needs.up_bias and e.up_bias is not None else None
    wanted: dict[str, Any] = {"want_scales": needs.weights, "want_hidden": needs.down, "bias_dtype": bias_dtype}
    down = oriented(e.down, e.transposed)
    return kernels.grouped_linear_activation_backward(rows, down, pre, sizes, e.spec, scales=scales, **wanted)


def routed_input_grad(dpre: Tensor, up: Tensor, transposed: bool, routing: Routing) -> Tensor:
    """The gradient of the tokens [T, H], from that of the pre-activation [S, C]."""
    if type(dpre) is not Tensor and is_traced(dpre):
        return traced.routed_input_grad(dpre, up, transposed, routing[:4])
    return rows_of.unpermute(product(routing, Layout.NN, dpre, oriented(up, transposed)), routing)


def routed_weight_grad(weight: Tensor, tokens: Tensor, rows: Tensor, leads: bool, routing: Routing) -> Tensor:
    """The gradient of a weight, stored as the weight is.

    Args:
        tokens: [T, H], spread over the experts, some columns at a time.
        rows: [S, C], of the experts.
        leads: whether the columns of the tokens are the first of the gradient's, [E, H, C]; else [E, C, H].
    """
    if type(rows) is not Tensor and is_traced(rows):
        return traced.routed_weight_grad(weight, tokens, rows, leads, routing[:4])
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for part in _slices(tokens, rows.shape[0]):
        spread = rows_of.permute(tokens[:, part], routing, fill=False)
        a, b, into = (spread, rows, out[:, part]) if leads else (rows, spread, out[:, :, part])
        kernels.grouped_gemm(Layout.TN, a, b, routing.split_sizes, out=into)
        del spread, a, b  # before the next are gathered
    return out


def _slices(tokens: Tensor, rows: int) -> Iterator[slice]:
    """Columns that are gathered together."""
    columns = tokens.shape[1]
    width = columns
    if rows * columns * tokens.element_size() > SLICED_FROM:
        width = -(-columns // (_SLICES * _SLICE_UNIT)) * _SLICE_UNIT
    return (slice(first, min(columns, first + width)) for first in range(0, columns, width))
