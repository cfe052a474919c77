"""The routed experts of a layer: Dispatch -> the ops of a GroupedMLP -> Combine, from tokens to tokens.

Unfused, the rows of the experts are kept for the gradient of the first weights: k rows a token. The fusion keeps the
tokens, and gathers the rows again in the backward. Everything between the two permutations is :class:`GroupedMLP`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import FusedOp, Gradient, Grads, Match, Pattern, optional, register_fusion
from ...fuser.runtime.call import evaluate
from .. import routing as permutation
from ..checks import product_dtype
from ..glu import Activated
from ..grouped_linear import GroupedLinear
from ..moe import ROUTING, Combine, Dispatch
from ..routed_mlp import Experts, routed_mlp
from ..routing import Routing
from ..scale import Scale
from .grouped_mlp import GroupedMLP

_SCALES = {"scale": "scales", "out_scale": "out_scale_scales"}  # by role: the keyword of the GroupedMLP


def _pattern() -> Pattern:
    path = Pattern.path(
        dispatch=Dispatch,
        fc1=GroupedLinear,
        act=Activated,
        scale=optional(Scale),
        fc2=GroupedLinear,
        out_scale=optional(Scale),
        combine=Combine,
    )
    for role in ("fc1", "fc2"):
        path = path.edge("dispatch", role, "split_sizes")
    for role in _SCALES:
        path = path.edge("dispatch", role, "scales")
    for name in ROUTING:
        path = path.edge("dispatch", "combine", name)
    return path


def _as_many_groups(match: Match) -> bool:
    return bool(match.dispatch.num_experts == match.fc1.num_groups == match.fc2.num_groups)


@register_fusion(
    _pattern()
    .absent("output", "fc1")
    .absent("output", "fc2")
    .absent("grad_input", "fc1")
    .absent("grad_input", "fc2")
    .where("dispatch, fc1 and fc2 have different numbers of experts", _as_many_groups),
    priority=40,
)
class RoutedMLP(FusedOp):
    """Keeps the tokens, the permutation, and what :class:`GroupedMLP` keeps but for its input."""

    dispatch: Dispatch
    fc1: GroupedLinear
    act: Activated
    scale: Scale | None
    fc2: GroupedLinear
    out_scale: Scale | None
    combine: Combine
    untraced = frozenset({"_experts"})

    class Saved(NamedTuple):
        tokens: Tensor | None
        routing: Routing
        weights_dtype: torch.dtype
        x_dtype: torch.dtype
        mlp: GroupedMLP.Saved

    def __init__(self, **roles: Any) -> None:
        super().__init__(**roles)
        self._experts: list[GroupedMLP] = []  # no child of this op: its parameters are those of the roles

    @property
    def experts(self) -> GroupedMLP:
        """What runs between the two permutations."""
        if not self._experts:
            inside = {role: op for role, op in self.parts.items() if role not in ("dispatch", "combine")}
            self._experts.append(GroupedMLP(**{**dict.fromkeys(_SCALES), **inside}))
        return self._experts[0]

    def fwd(
        self,
        x: Tensor,
        *,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Saved | None]:
        if not needs_grad and type(x) is Tensor and x.is_cuda and autocast_dtype in (None, x.dtype):
            experts = self._in_one_call(x.dtype)
            if experts is not None:
                return routed_mlp(experts, x, top_k_index, top_k_weights), None
        tokens = x.to(product_dtype(x.dtype, autocast_dtype))
        routing = permutation.route(top_k_index, self.dispatch.num_experts, tokens.dtype, top_k_weights.contiguous())
        scales = permutation.scales_of(routing, top_k_weights)
        factors = {keyword: scales for role, keyword in _SCALES.items() if getattr(self, role) is not None}
        rows, needs = permutation.spread(tokens, routing, fill=False), self._needs_of_mlp(needs_grad)
        y, saved = self.experts.fwd(
            rows,
            split_sizes=routing.split_sizes,
            **factors,
            needs_grad=needs,
            autocast_dtype=autocast_dtype,
            x_is_inner=True,
        )
        kept = saved._replace(fc1=saved.fc1._replace(x=None))
        trains = tokens if "fc1.weight" in needs else None
        routing = routing._replace(scales=None)
        return permutation.add(y, routing), self.Saved(trains, routing, top_k_weights.dtype, x.dtype, kept)

    def _in_one_call(self, dtype: torch.dtype) -> Experts | None:
        """The experts as the one call of a whole layer takes them: stacked, and scaled after the second linear."""
        fc1, fc2 = self.fc1, self.fc2
        if self.scale is not None or self.out_scale is None or fc1.transposed_weight != fc2.transposed_weight:
            return None
        if any(fc1.per_group.values()) or any(fc2.per_group.values()):
            return None
        weights = fc1.one_parameter("weight"), fc2.one_parameter("weight")
        if weights[0].dtype != dtype or weights[1].dtype != dtype:
            return None
        up_bias, down_bias = (fc.one_parameter("bias") if fc.has_bias else None for fc in (fc1, fc2))
        return Experts(*weights, up_bias, down_bias, self.act.spec, fc1.transposed_weight)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        needs, routing, tokens = self._needs_of_mlp(needs_grad), saved.routing, saved.tokens

        def input_rows() -> Tensor:
            assert tokens is not None
            return permutation.spread(tokens, routing, fill=False)

        rows = permutation.spread(dy, routing, fill=False)
        mlp = self.experts.gradients(saved.mlp, rows, needs, input_rows)
        grads: dict[str, Gradient] = {name: gradient for name, gradient in mlp.items() if name in needs_grad}
        if "x" in needs_grad:
            grads["x"] = lambda: _token_grads(mlp["x"], routing, saved.x_dtype)
        if "top_k_weights" in needs_grad:
            scales = [evaluate(mlp[name]) for name in _SCALES.values() if name in needs]
            grads["top_k_weights"] = lambda: _weight_grads(scales, routing, saved.weights_dtype)
        return grads

    def _needs_of_mlp(self, needs_grad: frozenset[str]) -> frozenset[str]:
        return _needs_of_mlp(needs_grad, self.scale is not None, self.out_scale is not None)


def _token_grads(drows: Gradient, routing: Routing, dtype: torch.dtype) -> Tensor:
    rows = evaluate(drows)
    assert rows is not None
    return permutation.add(rows.to(dtype), routing)


def _weight_grads(dscales: list[Tensor | None], routing: Routing, dtype: torch.dtype) -> Tensor:
    """[T, k], from those of the rows [S] at each place where they are scaled."""
    there = [scales for scales in dscales if scales is not None]
    if not there:
        return torch.zeros_like(routing.place, dtype=dtype)
    return permutation.by_slot(there[0] if len(there) == 1 else there[0] + there[1], routing, dtype)


@lru_cache(maxsize=4096)
def _needs_of_mlp(needs_grad: frozenset[str], scale: bool, out_scale: bool) -> frozenset[str]:
    """The gradients that the experts must give, by names of :class:`GroupedMLP`."""
    needs = set(needs_grad - {"top_k_weights"})
    if "top_k_weights" in needs_grad:
        needs |= ({"scales"} if scale else set()) | ({"out_scale_scales"} if out_scale else set())
    return frozenset(needs)
