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

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..fuser.config import active_config, use_config
from ..fuser.tracing import named_range
from ..ops.activation_spec import ActivationSpec
from ..ops.routed_backward import Needs, routed_activation_backward, routed_input_grad, routed_weight_grad
from ..ops.routed_mlp import Experts, routed_mlp, routed_mlp_forward
from ..ops.routing import Routing


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
        made = routed_mlp_forward(experts, x, index, weights, keep_pre=needs.through or needs.down)
        kept = *made.routing[:3], made.scales, made.pre
        ctx.save_for_backward(x if needs.up else None, *kept, up, down, up_bias, down_bias)
        ctx.how = spec, transposed, made.routing.is_native, weights.dtype, active_config()
        return made.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        backward = Backward(ctx.needs, ctx.saved_tensors, ctx.how)
        ctx.maybe_clear_saved_tensors()  # so that what is not needed further is free; nothing with retain_graph
        with use_config(ctx.how[-1]), named_range("fusible::GroupedMLP.bwd"):
            return None, None, *backward.run(dy if dy.stride(-1) == 1 else dy.contiguous())


class Backward:
    """Computes the gradients; lets go of each tensor after the last that reads it."""

    def __init__(self, needs: Needs, saved: tuple[Any, ...], how: tuple[Any, ...]) -> None:
        x, counts, order, place, scales, pre, up, down, up_bias, down_bias = saved
        spec, transposed, own, self.weights_dtype, _ = how
        self.needs, self.x, self.scales, self.pre = needs, x, scales, pre
        self.routing = Routing(counts, order, place, own)
        self.experts = Experts(up, down, up_bias, down_bias, spec, transposed)

    def run(self, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the ids (none), the weights of the slots, and the parameters."""
        needs, e, routing = self.needs, self.experts, self.routing
        dpre, hidden, dweights, dup_bias, ddown_bias = self._through_activation(dy)
        dx = dup = ddown = None
        if needs.x:
            dx = routed_input_grad(dpre, e.up, e.transposed, routing)
        if needs.up:
            dup = routed_weight_grad(e.up, self.x, dpre, e.transposed, routing)
        del dpre
        if needs.down:
            ddown = routed_weight_grad(e.down, dy, hidden, not e.transposed, routing)
        return dx, None, dweights, dup, ddown, dup_bias, ddown_bias

    def _through_activation(self, dy: Tensor) -> tuple[Any, ...]:
        pre, self.pre = self.pre, None
        return routed_activation_backward(
            self.experts, self.needs, dy, self.routing, self.scales, pre, self.weights_dtype
        )
