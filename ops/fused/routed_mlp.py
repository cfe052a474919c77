"""The routed experts of a layer: Dispatch -> the ops of a GroupedMLP -> Combine, from tokens to tokens.

Unfused, the rows of the experts are kept for the gradient of the first weights: k rows a token. The fusion keeps the
tokens, and gathers the rows again in the backward. Everything between the two permutations is :class:`GroupedMLP`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads, Promises, register_fusion
from ...fuser.contract.tracing import is_traced
from ...fuser.runtime.call import evaluate
from ..formats.recipe import Recipe
from ..grouped.grouped_linear import GroupedLinear, input_grad
from ..kernels.doors import routing as permutation
from ..kernels.doors.gathered_wgrad import gathered_wgrad
from ..kernels.doors.inference import Experts, one_call
from ..kernels.doors.routing import Routing
from ..quantized.linear import in_force
from ..routed.moe import Combine, Dispatch
from ..values.checks import product_dtype
from .activation_role import reads_numbers, spec_of, vector_grads
from .grouped_mlp import GroupedMLP, reads_preact
from .inner_mlp import SCALES, InnerMLP, tokens_to_tokens
from .routed_forward import forward, gathered, routed_mlp
from .routed_pattern import with_as_many_groups

_WEIGHT = frozenset({"weight"})


@register_fusion(with_as_many_groups(tokens_to_tokens(Dispatch, Combine)), priority=40)
class RoutedMLP(InnerMLP):
    """Keeps the tokens, the permutation, and the state of :class:`GroupedMLP` except its input."""

    dispatch: Dispatch
    combine: Combine
    promises = Promises(replayable=True)

    class Saved(NamedTuple):
        tokens: Tensor | None
        routing: Routing
        weights_dtype: torch.dtype
        x_dtype: torch.dtype
        mlp: GroupedMLP.Saved

    def fwd(
        self,
        x: Tensor,
        *,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Saved | None]:
        if not needs_grad and autocast_dtype in (None, x.dtype):
            y = self._in_one_call(x, top_k_index, top_k_weights)
            if y is not None:
                return y, None
        tokens = x.to(product_dtype(x.dtype, autocast_dtype))
        needs = self.needs_of_experts(needs_grad)
        y, routing, saved = forward(
            *(self.experts, self.dispatch.num_experts, tokens, top_k_index, top_k_weights),
            scaled_by=self.scaled_by,
            needs_grad=needs,
            autocast_dtype=autocast_dtype,
        )
        trains = None
        if saved.fc1.recipe is None:
            saved = saved._replace(fc1=saved.fc1._replace(x=None))
            recompute = saved.preact is None and reads_preact(needs)
            trains = tokens if "fc1.weight" in needs or recompute else None
        kept = _with_split_sizes(saved, None)
        return y, self.Saved(trains, routing, top_k_weights.dtype, x.dtype, kept)

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
        needs, dy = self.needs_of_experts(needs_grad), dy if dy.stride(-1) == 1 else dy.contiguous()
        experts, routing, mlp = self.experts, saved.routing, _with_split_sizes(saved.mlp, saved.routing.split_sizes)
        if mlp.fc1.recipe is not None:
            return self._quantized_bwd(mlp.fc1.recipe, saved, mlp, dy, needs, needs_grad)
        if mlp.preact is None and reads_preact(needs):
            assert saved.tokens is not None
            mlp = experts.recomputed(mlp, permutation.permute(saved.tokens, routing, fill=False))
        rows = permutation.permute(dy, routing, fill=False)
        pre, dots, hidden, bias, vectors = experts.through_fc2(mlp, rows, needs)
        grads: dict[str, Gradient] = {"fc1.bias": bias, **vector_grads(self.act, vectors, needs)}
        if "fc2.bias" in needs:
            grads["fc2.bias"] = evaluate(experts.bias_grads(mlp, rows)["bias"])
        if "top_k_weights" in needs_grad:
            scales = () if dots is None else tuple(experts.scale_grads(mlp, rows, dots, needs).values())
            grads["top_k_weights"] = partial(_weight_grads, scales, routing, saved.weights_dtype)
        if "x" in needs:
            grads["x"] = partial(_token_grads, pre, mlp.fc1, routing, saved.x_dtype)
        if saved.tokens is not None:
            grads["fc1.weight"] = partial(_wgrad, self.fc1, saved.tokens, pre, self.fc1.transposed_weight, routing)
        if hidden is not None:
            grads["fc2.weight"] = partial(_wgrad, self.fc2, dy, hidden, not self.fc2.transposed_weight, routing)
        return {name: gradient for name, gradient in grads.items() if name in needs_grad}

    def _quantized_bwd(
        self,
        recipe: Recipe,
        saved: Saved,
        mlp: GroupedMLP.Saved,
        dy: Tensor,
        needs: frozenset[str],
        needs_grad: frozenset[str],
    ) -> Grads:
        """The backward of a call under a recipe: the experts keep quantised operands, so no rows of x are gathered
        again.
        """
        routing = saved.routing
        reads_values = self.experts.reads_values(recipe, mlp, needs)
        rows = permutation.permute(dy, routing, fill=False) if reads_values else gathered(dy, routing)
        grads = dict(self.experts.quantized_bwd(recipe, mlp, rows, needs))
        scales = [grads.pop(keyword) for keyword in SCALES.values() if keyword in grads]
        dx = grads.pop("x", None)
        if "x" in needs_grad:
            grads["x"] = lambda: _of_tokens(evaluate(dx), routing, saved.x_dtype)
        if "top_k_weights" in needs_grad:
            grads["top_k_weights"] = partial(_weight_grads, scales, routing, saved.weights_dtype)
        return {name: gradient for name, gradient in grads.items() if name in needs_grad}


def _with_split_sizes(saved: GroupedMLP.Saved, split_sizes: Any) -> GroupedMLP.Saved:
    """Replaces the split sizes; None in the saved state, as they are part of the routing, which is kept."""
    fc1, fc2 = (part._replace(split_sizes=split_sizes) for part in (saved.fc1, saved.fc2))
    return saved._replace(fc1=fc1, fc2=fc2)


def _token_grads(dpre: Tensor, fc1: GroupedLinear.Saved, routing: Routing, dtype: torch.dtype) -> Tensor:
    return _of_tokens(input_grad(dpre, fc1), routing, dtype)


def _of_tokens(rows: Tensor | None, routing: Routing, dtype: torch.dtype) -> Tensor:
    """The sums of each token's rows."""
    assert rows is not None
    return permutation.unpermute(rows.to(dtype), routing)


def _weight_grads(dscales: Sequence[Gradient], routing: Routing, dtype: torch.dtype) -> Tensor:
    """The gradient [T, k] of the routing weights, from those of the rows [S] at each place where they are scaled."""
    if not dscales:
        return torch.zeros_like(routing.row_of_slot, dtype=dtype)
    first, *others = [gradient for gradient in map(evaluate, dscales) if gradient is not None]
    return permutation.by_slot(sum(others, first), routing, dtype)


def _wgrad(fc: GroupedLinear, tokens: Tensor, rows: Tensor, leads: bool, routing: Routing) -> Tensor | None:
    """The gradient of a linear's weight from tokens [T, H], which are gathered for it, and rows of experts [S, C]."""
    wgrad = partial(gathered_wgrad, tokens, rows, routing, leads)
    return evaluate(fc.delivered(wgrad, (tokens, rows), _WEIGHT)["weight"])
