"""The doors of a layer's routed experts as custom ops, as :mod:`fusible.ops.kernels.custom_ops` has the kernel door.

A routing is its ``counts`` [E + 1], ``order`` [S] and ``place`` [T, k], and whether our ``own`` kernels made it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import routed_backward as backward
from . import routed_mlp as routed
from .activation_spec import ActivationSpec
from .kernels import outputs
from .kernels.custom_ops import SPEC, obeying, register
from .moe_ops import fake_routing
from .routed_backward import Needs
from .routed_mlp import Experts
from .routing import Routing

_EXPERTS = f"Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, {SPEC}, bool transposed"
_TOKENS = "Tensor x, Tensor top_k_index, Tensor top_k_weights"
_ROUTING = "Tensor counts, Tensor order, Tensor place, bool own"


def _fake_forward(x: Tensor, index: Tensor, weights: Tensor, *how: Any) -> tuple[Tensor, ...]:
    *experts, keep_pre, own, _ = how
    e = _experts(experts)
    wide = torch.float32 if own else torch.promote_types(weights.dtype, torch.float32)
    scales = index.new_empty(index.numel(), dtype=wide)
    columns = e.up.shape[2 if e.transposed else 1]
    pre = x.new_empty((index.numel(), columns)) if keep_pre else x.new_empty(0)
    return x.new_empty(x.shape), *fake_routing(index, e.up.shape[0], own), scales, pre


@register(
    f"routed_mlp_forward({_TOKENS}, {_EXPERTS}, bool keep_pre, bool own, str switches) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_forward,
)
def _routed_mlp_forward(x: Tensor, index: Tensor, weights: Tensor, *how: Any) -> tuple[Tensor, ...]:
    *experts, keep_pre, _, switches = how
    with obeying(switches):
        y, found, scales, pre = routed.routed_mlp_forward(_experts(experts), x, index, weights, keep_pre)
    return y, *found[:3], scales, x.new_empty(0) if pre is None else pre


def _fake_activation_backward(dy: Tensor, *how: Any) -> tuple[Tensor, ...]:
    _, _, place, _, scales, pre, _, up_bias, down_bias, *spec, _, needs, dtype, _ = how
    wants, dpre, hidden = Needs(*needs), None, None
    if pre is not None:
        dpre, _, hidden, _ = outputs.new_grads(pre, _spec(*spec), scales, False, wants.down)
    dweights = torch.empty_like(place, dtype=dtype)
    dup_bias, ddown_bias = (
        None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
        for bias in (up_bias, down_bias)
    )
    there = wants.through, wants.down, wants.weights, wants.up_bias, wants.down_bias
    made = dpre, hidden, dweights, dup_bias, ddown_bias
    return _all(dy, *[tensor if wanted else None for wanted, tensor in zip(there, made, strict=True)])


@register(
    f"routed_activation_backward(Tensor dy, {_ROUTING}, Tensor scales, Tensor? pre, Tensor down, Tensor? up_bias, "
    f"Tensor? down_bias, {SPEC}, bool transposed, bool[] needs, ScalarType weights_dtype, str switches) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_activation_backward,
)
def _routed_activation_backward(dy: Tensor, *how: Any) -> tuple[Tensor, ...]:
    found, (scales, pre, down, up_bias, down_bias, *spec, transposed, needs, dtype, switches) = how[:4], how[4:]
    experts = Experts(down, down, up_bias, down_bias, _spec(*spec), transposed)
    with obeying(switches):
        made = backward.routed_activation_backward(experts, Needs(*needs), dy, Routing(*found), scales, pre, dtype)
    return _all(dy, *made)


@register(
    f"routed_input_grad(Tensor dpre, Tensor up, bool transposed, {_ROUTING}, str switches) -> Tensor",
    lambda dpre, up, transposed, counts, order, place, *_: dpre.new_empty(
        place.shape[0], up.shape[1 if transposed else 2]
    ),
)
def _routed_input_grad(dpre: Tensor, up: Tensor, transposed: bool, *how: Any) -> Tensor:
    with obeying(how[-1]):
        return backward.routed_input_grad(dpre, up, transposed, Routing(*how[:4]))


@register(
    f"routed_weight_grad(Tensor weight, Tensor tokens, Tensor rows, bool leads, {_ROUTING}, str switches) -> Tensor",
    lambda weight, *_: torch.empty_like(weight, memory_format=torch.contiguous_format),
)
def _routed_weight_grad(weight: Tensor, tokens: Tensor, rows: Tensor, leads: bool, *how: Any) -> Tensor:
    with obeying(how[-1]):
        return backward.routed_weight_grad(weight, tokens, rows, leads, Routing(*how[:4]))


def _all(like: Tensor, *made: Tensor | None) -> tuple[Tensor, ...]:
    """An empty tensor for each that is not there."""
    return tuple([like.new_empty(0) if tensor is None else tensor for tensor in made])


def _experts(listed: list[Any]) -> Experts:
    up, down, up_bias, down_bias, *spec, transposed = listed
    return Experts(up, down, up_bias, down_bias, _spec(*spec), transposed)


_spec = cache(ActivationSpec)
