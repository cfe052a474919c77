"""The routed experts of a layer: Dispatch -> the ops of a GroupedMLP -> Combine, from tokens to tokens.

Unfused, the rows of the experts are kept for the gradient of the first weights: k rows a token. The fusion keeps the
tokens, and gathers the rows again in the backward. Everything between the two permutations is :class:`GroupedMLP`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...fuser import Gradient, Grads, Promises, register_fusion
from ...fuser.contract.tracing import is_traced
from ...fuser.runtime.call import evaluate
from ..kernels.doors import routing as permutation
from ..kernels.doors.inference import Experts, one_call
from ..kernels.doors.routing import Routing
from ..quantized.linear import in_force
from ..quantized.operands import GatheredTokens
from ..routed.call import RoutedCall
from ..routed.moe import Combine, Dispatch
from .activation_role import reads_numbers, spec_of
from .grouped_mlp import GroupedMLP
from .inner_mlp import SCALES, InnerMLP, needs_of_experts, tokens_to_tokens
from .routed import with_as_many_groups
from .routed_forward import forward, routed_mlp


@register_fusion(with_as_many_groups(tokens_to_tokens(Dispatch, Combine)), priority=40)
class RoutedMLP(InnerMLP):
    """A routed layer, from tokens to tokens, as one op around a :class:`GroupedMLP`.

    It keeps the tokens, the permutation, and the state of :class:`GroupedMLP` except its input, whose rows the backward
    gathers again.
    """

    dispatch: Dispatch
    combine: Combine
    promises = Promises(replayable=True)

    class Saved(NamedTuple):
        routing: Routing
        weights_dtype: torch.dtype
        x_dtype: torch.dtype
        mlp: GroupedMLP.Saved

    def run(self, call: RoutedCall) -> tuple[Tensor, Saved | None]:
        x, weights = call.x, call.top_k_weights
        if not call.needs_grad and call.autocast_dtype in (None, x.dtype):
            y = self._in_one_call(x, call.top_k_index, weights)
            if y is not None:
                return y, None
        y, routing, saved = forward(self.experts, self.dispatch.num_experts, call, self.scaled_by)
        return y, self.Saved(routing, weights.dtype, x.dtype, _without_routing(saved))

    def _in_one_call(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor | None:
        """The output without gradients, where one call of the extension gives it, or a compiler's one op."""
        traced = type(x) is not Tensor and is_traced(x)
        if not traced and (type(x) is not Tensor or not x.is_cuda):
            return None
        experts = self._stacked(x.dtype)
        if experts is None:
            return None
        if traced:
            return routed_mlp(x, top_k_index, top_k_weights, experts)
        call = one_call(experts)
        return None if call is None else call(x, top_k_index, top_k_weights)

    def _stacked(self, dtype: torch.dtype) -> Experts | None:
        """The experts as a call of all of them takes them: stacked, and scaled after the second linear."""
        fc1, fc2 = self.fc1, self.fc2
        if self.scale is not None or self.out_scale is None:
            return None
        if fc1.recipe is not fc2.recipe or in_force(fc1.recipe) is not None or reads_numbers(self.act):
            return None
        if fc1.transposed_weight != fc2.transposed_weight:
            return None
        if True in fc1.per_group.values() or True in fc2.per_group.values():
            return None
        weights = fc1.one_parameter("weight"), fc2.one_parameter("weight")
        if weights[0].dtype != dtype or weights[1].dtype != dtype:
            return None
        up_bias = fc1.one_parameter("bias") if fc1.has_bias else None
        down_bias = fc2.one_parameter("bias") if fc2.has_bias else None
        return Experts(*weights, up_bias, down_bias, spec_of(self.act), fc1.transposed_weight)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        """Computes the parts that read the rows of ``dy`` at once; the rest are thunks, which hold their inputs."""
        routing, needs = saved.routing, needs_of_experts(needs_grad, self.scaled_by)
        mlp, rows = _with_routing(saved.mlp, routing), GatheredTokens.of(dy, routing)
        grads = dict(self.experts.bwd(mlp, rows, needs_grad=needs))
        scales = [grads.pop(keyword) for keyword in SCALES.values() if keyword in grads]
        if "fc2.bias" in grads:
            grads["fc2.bias"] = evaluate(grads["fc2.bias"])
        if "x" in grads:
            grads["x"] = partial(_of_tokens, grads["x"], routing, saved.x_dtype)
        if "top_k_weights" in needs_grad:
            grads["top_k_weights"] = partial(_weight_grads, scales, routing, saved.weights_dtype)
        return grads


def _without_routing(saved: GroupedMLP.Saved) -> GroupedMLP.Saved:
    """The state without what is part of the routing, which is kept once."""
    x, gone = saved.fc1.x, cast(Any, None)
    fc1 = saved.fc1._replace(x=x.tokens if isinstance(x, GatheredTokens) else x, split_sizes=gone)
    return saved._replace(fc1=fc1, fc2=saved.fc2._replace(split_sizes=gone))


def _with_routing(saved: GroupedMLP.Saved, routing: Routing) -> GroupedMLP.Saved:
    """The inverse of :func:`_without_routing`."""
    x, sizes = saved.fc1.x, routing.split_sizes
    rows = GatheredTokens(x, routing) if saved.fc1.recipe is None and isinstance(x, Tensor) else x
    fc1, fc2 = saved.fc1._replace(x=rows, split_sizes=sizes), saved.fc2._replace(split_sizes=sizes)
    return saved._replace(fc1=fc1, fc2=fc2)


def _of_tokens(dx: Gradient, routing: Routing, dtype: torch.dtype) -> Tensor:
    """The sums of each token's rows."""
    rows = evaluate(dx)
    assert rows is not None
    return permutation.unpermute(rows.to(dtype), routing)


def _weight_grads(dscales: Sequence[Gradient], routing: Routing, dtype: torch.dtype) -> Tensor:
    """The gradient [T, k] of the routing weights, from those of the rows [S] at each place where they are scaled."""
    if not dscales:
        return torch.zeros_like(routing.row_of_slot, dtype=dtype)
    first, *others = [gradient for gradient in map(evaluate, dscales) if gradient is not None]
    return permutation.by_slot(sum(others, first), routing, dtype)
