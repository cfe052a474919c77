"""The steps of a mixture-of-experts layer as custom ops, as :mod:`fusible.ops.kernels.custom_ops` has the kernel door.

A routing is its ``tokens_per_expert`` [E + 1], ``slot_of_row`` [S], ``row_of_slot`` [T, k] and ``is_native``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..fuser.module_state import with_tensors
from . import routing
from .activation import Activation
from .activation_spec import ActivationSpec
from .fused.routed_mlp import RoutedMLP
from .gathered_wgrad import gathered_wgrad, new_wgrad
from .glu import GLU, Activated
from .grouped_linear import GroupedLinear
from .inference import Experts, one_call
from .kernels.custom_ops import SPEC, obeying, register
from .moe import Combine, Dispatch
from .routing import Routing
from .scale import Scale


@register(
    "route(Tensor top_k_index, int num_experts) -> (Tensor, Tensor, Tensor)",
    lambda index, num_experts: fake_routing(index, num_experts, is_native=True),
)
def _route(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    found = routing.route(index, num_experts, torch.float32)
    return found.tokens_per_expert, found.slot_of_row.int(), found.row_of_slot.int()


@register(
    "spread_rows(Tensor x, Tensor place, Tensor counts) -> Tensor",
    lambda x, place, counts: x.new_empty(place.numel(), x.shape[1]),
)
def _spread_rows(x: Tensor, place: Tensor, counts: Tensor) -> Tensor:
    return routing.permute(x, routing.of_places(place, counts, x.dtype))


@register(
    "sum_rows(Tensor rows, Tensor place, Tensor counts) -> Tensor",
    lambda rows, place, counts: rows.new_empty(place.shape[0], rows.shape[1]),
)
def _sum_rows(rows: Tensor, place: Tensor, counts: Tensor) -> Tensor:
    return routing.unpermute(rows, routing.of_places(place, counts, rows.dtype))


@register(
    "gathered_wgrad(Tensor tokens, Tensor rows, Tensor tokens_per_expert, Tensor slot_of_row, Tensor row_of_slot, "
    "bool is_native, bool leads, ScalarType dtype, str switches) -> Tensor",
    lambda tokens, rows, tokens_per_expert, slot_of_row, row_of_slot, is_native, leads, dtype, switches: new_wgrad(
        tokens, rows, tokens_per_expert, leads, dtype
    ),
)
def _gathered_wgrad(tokens: Tensor, rows: Tensor, *arguments: Any) -> Tensor:
    *routing, leads, dtype, switches = arguments
    with obeying(switches):
        grad = gathered_wgrad(tokens, rows, Routing(*routing), leads, out_dtype=dtype)
    assert isinstance(grad, Tensor)
    return grad


@register(
    "routed_mlp(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, "
    f"Tensor? down_bias, {SPEC}, bool transposed, str switches) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
)
def _routed_mlp(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *arguments: Any) -> Tensor:
    up, down, up_bias, down_bias, *spec, transposed, switches = arguments
    experts = Experts(up, down, up_bias, down_bias, ActivationSpec(*spec), transposed)
    with obeying(switches):
        call = one_call(experts) if x.is_cuda else None
        if call is not None:
            return call(x, top_k_index, top_k_weights)
        call_of_steps: dict[str, Any] = {"top_k_index": top_k_index, "top_k_weights": top_k_weights}
        return _fusion(experts).fwd(x, **call_of_steps, needs_grad=frozenset(), autocast_dtype=None)[0]


def _fusion(e: Experts) -> RoutedMLP:
    """The fusion on these experts."""
    tensors = {"fc1.weight": e.up, "fc1.bias": e.up_bias, "fc2.weight": e.down, "fc2.bias": e.down_bias}
    biases = e.up_bias is not None, e.down_bias is not None
    form = e.up.shape, e.down.shape, e.up.dtype, *biases, e.spec, e.transposed
    fusion: RoutedMLP = with_tensors(_form_of(*form), {name: t for name, t in tensors.items() if t is not None})
    return fusion


@cache
def _form_of(
    up: torch.Size,
    down: torch.Size,
    dtype: torch.dtype,
    up_bias: bool,
    down_bias: bool,
    spec: ActivationSpec,
    transposed: bool,
) -> RoutedMLP:
    """The fusion on parameters without data."""
    act: Activated = GLU(spec.name) if spec.gated else Activation(spec.name)
    act.spec = spec
    linears = [
        GroupedLinear(
            shape[0],
            *(shape[1:] if transposed else shape[:0:-1]),
            bias=bias,
            device="meta",
            dtype=dtype,
            transposed_weight=transposed,
        )
        for shape, bias in ((up, up_bias), (down, down_bias))
    ]
    roles = {"dispatch": Dispatch(up[0]), "fc1": linears[0], "act": act, "scale": None, "fc2": linears[1]}
    return RoutedMLP(**roles, out_scale=Scale(), combine=Combine())


def fake_routing(index: Tensor, num_experts: int, is_native: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A routing without data."""
    whole = torch.int32 if is_native else torch.int64
    counts, order = index.new_empty(num_experts + 1, dtype=torch.int32), index.new_empty(index.numel(), dtype=whole)
    return counts, order, torch.empty_like(index, dtype=whole, memory_format=torch.contiguous_format)
