"""The routed experts of a layer as one function of autograd, which keeps the tokens instead of the rows of the experts.

What is live in the backward, in bytes a row of the experts (bf16; K columns of a token, F of the hidden rows):

    kept from the forward                     pre-activation 4F
    rows of dy, then through the activation   4F + 2K, then dpre 4F and hidden 2F more
    dx: rows, then their sum                  dpre 4F, hidden 2F, rows 2K
    gradient of the first weights             dpre 4F, hidden 2F, a slice of the rows of x
    gradient of the second weights            hidden 2F, a slice of the rows of dy

The last two come last because each leaves a gradient as large as all experts, and the smaller one's operands are the
last to stay. Rows are gathered again for them, some columns at a time: a gather costs a fraction of a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..fuser import settings
from ..fuser.trace import named_range
from ..ops import kernels
from ..ops import routing as rows_of
from ..ops.activations import ActivationSpec
from ..ops.kernels import Layout
from ..ops.routed_mlp import Experts, in_steps, oriented, product, routed_mlp
from .routing import of_parts

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


def run(experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[T, H]: the weighted sums over the experts of each token; differentiable."""
    *parameters, spec, transposed = experts
    given = x, top_k_index, top_k_weights, *parameters
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        y: Tensor = _Routed.apply(spec, transposed, *given)  # type: ignore[no-untyped-call]
        return y
    return routed_mlp(experts, x, top_k_index, top_k_weights)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: ActivationSpec, transposed: bool, *given: Any) -> Tensor:
        x, index, weights, up, down, up_bias, down_bias = given
        wanted = ctx.needs_input_grad
        ctx.needs = needs = Needs(wanted[2], *wanted[4:])
        experts = Experts(up, down, up_bias, down_bias, spec, transposed)
        y, routing, scales, pre = in_steps(experts, x, index, weights, keep_pre=needs.through or needs.down)
        ctx.save_for_backward(x if needs.up else None, *routing[:4], scales, pre, up, down, up_bias, down_bias)
        ctx.how = spec, transposed, routing.own, weights.dtype, settings.current()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        backward = Backward(ctx.needs, ctx.saved_tensors, ctx.how)
        ctx.maybe_clear_saved_tensors()  # so that what is not needed further is free; nothing with retain_graph
        with settings.using(ctx.how[-1]), named_range("fusible::GroupedMLP.bwd"):
            return None, None, *backward.run(dy if dy.stride(-1) == 1 else dy.contiguous())


class Backward:
    """Computes the gradients; lets go of each tensor after the last that reads it."""

    def __init__(self, needs: Needs, saved: tuple[Any, ...], how: tuple[Any, ...]) -> None:
        x, *parts, scales, pre, up, down, up_bias, down_bias = saved
        spec, transposed, own, self.weights_dtype, _ = how
        self.needs, self.x, self.scales, self.pre = needs, x, scales, pre
        self.routing = of_parts(parts, own)
        self.experts = Experts(up, down, up_bias, down_bias, spec, transposed)
        self.hidden: Tensor | None = None
        self.dup_bias: Tensor | None = None

    def run(self, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the ids (none), the weights of the slots, and the parameters."""
        needs, e = self.needs, self.experts
        dweights, ddown_bias = self._through_activation(dy)
        dx = self._input_grad() if needs.x else None
        dup = ddown = None
        if needs.up:
            dup = self._weight_grad(e.up, self.x, self.pre, leads=e.transposed)
        self.pre = None
        if needs.down:
            ddown = self._weight_grad(e.down, dy, self.hidden, leads=not e.transposed)
        return dx, None, dweights, dup, ddown, self.dup_bias, ddown_bias

    def _through_activation(self, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Turns ``pre`` into its gradient, makes the hidden rows; the gradients of the weights and of down's bias."""
        needs, e, sizes = self.needs, self.experts, self.routing.split_sizes
        dweights = dbias = None
        rows = rows_of.spread(dy, self.routing, fill=False)
        pre, dots, self.hidden, self.dup_bias = self._grads(rows)
        self.pre = pre
        if needs.weights:
            if e.down_bias is not None:
                dots = dots + kernels.row_dots(rows, e.down_bias, sizes, dots.dtype)
            dweights = rows_of.by_slot(dots, self.routing, self.weights_dtype)
        if needs.down_bias and e.down_bias is not None:
            dbias = kernels.column_sums(rows, sizes, e.down_bias.dtype, self.scales)
        return dweights, dbias

    def _grads(self, rows: Tensor) -> tuple[Any, Any, Tensor | None, Tensor | None]:
        """Gradients of pre-activation and its bias, ``<u, a>`` by row, scaled hidden rows: those that are wanted."""
        e, needs = self.experts, self.needs
        if self.pre is None:
            return None, None, None, None
        if not needs.through:
            return None, None, kernels.activate(self.pre, e.spec, self.scales), None
        return kernels.grouped_linear_activation_backward(
            rows,
            oriented(e.down, e.transposed),
            self.pre,
            self.routing.split_sizes,
            e.spec,
            scales=self.scales,
            want_scales=needs.weights,
            want_hidden=needs.down,
            bias_dtype=e.up_bias.dtype if needs.up_bias and e.up_bias is not None else None,
        )

    def _input_grad(self) -> Tensor:
        e = self.experts
        rows = product(self.routing, Layout.NN, self.pre, oriented(e.up, e.transposed))
        return rows_of.add(rows, self.routing)

    def _weight_grad(self, weight: Tensor, tokens: Tensor, other: Any, leads: bool) -> Tensor:
        """Stored as the weight is, from rows of ``tokens`` [T, H], whose columns lead or come last, and other rows."""
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for part in _slices(tokens, self.routing.order.shape[0]):
            rows = rows_of.spread(tokens[:, part], self.routing, fill=False)
            a, b, into = (rows, other, out[:, part]) if leads else (other, rows, out[:, :, part])
            kernels.grouped_gemm(Layout.TN, a, b, self.routing.split_sizes, out=into)
            del rows, a, b  # before the next are gathered
        return out


def _slices(tokens: Tensor, rows: int) -> Iterator[slice]:
    """Columns that are gathered together."""
    columns = tokens.shape[1]
    width = columns
    if rows * columns * tokens.element_size() > SLICED_FROM:
        width = -(-columns // (_SLICES * _SLICE_UNIT)) * _SLICE_UNIT
    return (slice(first, min(columns, first + width)) for first in range(0, columns, width))
