"""What fused experts keep of a short call on a CPU, and its gradients from that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...fuser import Gradient, Grads
from ...fuser.contract.config import thread_config
from ..grouped.grouped_linear import GroupedLinear, with_rows_of
from ..kernels.doors.inference import (
    Experts,
    Gradients,
    Kept,
    Order,
    WantedGradients,
    backward_on_cpu,
    on_cpu,
    rows_backward_on_cpu,
    rows_on_cpu,
)
from ..quantized.linear import in_force
from .activation_role import reads_numbers, spec_of

_OF_FC2 = frozenset({"fc2.weight", "fc2.bias"})
_WEIGHTS = "top_k_weights"
_PARAMETERS = ("fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")


@dataclass(slots=True, eq=False)
class Forms:
    """Of the arguments of a call.

    Attributes:
        order: of the slots of tokens, where rows are gathered.
        scales: what the fused op calls them, or nothing.
        up_bias, down_bias: their dtypes.
    """

    x_shape: torch.Size
    scales: str
    scales_shape: torch.Size | None
    scales_dtype: torch.dtype | None
    up_bias: torch.dtype | None
    down_bias: torch.dtype | None
    order: Order | None

    @classmethod
    def of(cls, x: Tensor, name: str, scales: Tensor | None, experts: Experts, order: Order | None) -> Forms:
        up_bias, down_bias = experts.up_bias, experts.down_bias
        biases = None if up_bias is None else up_bias.dtype, None if down_bias is None else down_bias.dtype
        if scales is None:
            return cls(x.shape, "", None, None, *biases, order)
        return cls(x.shape, name, scales.shape, scales.dtype, *biases, order)


def stacked(fc1: GroupedLinear, fc2: GroupedLinear, act: Any, dtype: torch.dtype) -> Experts | None:
    """The experts as a call of all of them takes them; None where parameters or an activation are none such."""
    if fc1.recipe is not fc2.recipe or in_force(fc1.recipe) is not None or reads_numbers(act):
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
    return Experts(*weights, up_bias, down_bias, spec_of(act), fc1.transposed_weight)


def returns_all(fc1: GroupedLinear, fc2: GroupedLinear) -> bool:
    """Whether all gradients are returned at once, and the pre-activation is kept for them."""
    later = fc1.delay_wgrad_compute or fc2.delay_wgrad_compute
    elsewhere = fc1.accumulate_into_main_grad or fc2.accumulate_into_main_grad
    return not (later or elsewhere or thread_config.config.recompute)


def gives(needs_grad: frozenset[str]) -> bool:
    """Whether a short call gives these gradients: one of them must lie behind the second linear."""
    return not needs_grad <= _OF_FC2


def of_tokens(
    experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, needs_grad: frozenset[str]
) -> tuple[Tensor, Kept] | None:
    """The output of a :class:`RoutedMLP`, and what its backward needs; None where it runs kernel by kernel."""
    short = on_cpu(experts, x, top_k_index, top_k_weights)
    if short is None:
        return None
    y, kept, order = short
    return y, _kept_for(kept, _WEIGHTS, needs_grad, Forms.of(x, _WEIGHTS, top_k_weights, experts, order))


def of_rows(
    mlp: Any, x: Tensor, split_sizes: Any, scales: Tensor | None, out_scales: Tensor | None, needs_grad: frozenset[str]
) -> tuple[Tensor, Kept | None] | None:
    """The output of a :class:`GroupedMLP`, and what its backward needs; None where it runs kernel by kernel."""
    if type(x) is not Tensor or type(split_sizes) is not Tensor or (scales is not None and out_scales is not None):
        return None
    if needs_grad and not (gives(needs_grad) and returns_all(mlp.fc1, mlp.fc2)):
        return None
    experts = stacked(mlp.fc1, mlp.fc2, mlp.act, x.dtype)
    if experts is None:
        return None
    scale = scales if out_scales is None else out_scales
    short = rows_on_cpu(experts, x, split_sizes, scale, after=out_scales is not None)
    if short is None:
        return None
    y, kept = with_rows_of(x, short[0]), short[1]
    if not needs_grad:
        return y, None
    name = "scales" if out_scales is None else "out_scale_scales"
    return y, _kept_for(kept, name, needs_grad, Forms.of(x, name, scale, experts, None))


def gradients(kept: Kept, dy: Tensor, needs_grad: frozenset[str]) -> Grads:
    """By the names of the fused op, from that of its rows, or tokens."""
    forms: Forms = kept.caller
    wanted, order = _wanted(forms.scales, needs_grad), forms.order
    if order is None:
        return _named(rows_backward_on_cpu(kept, dy, wanted), forms)
    return _named(backward_on_cpu(order, kept, dy, wanted), forms)


@lru_cache(maxsize=4096)
def _wanted(scales: str, needs_grad: frozenset[str]) -> WantedGradients:
    """By position."""
    return WantedGradients(*[name in needs_grad for name in ("x", scales, *_PARAMETERS)])


def _kept_for(kept: Kept, scales: str, needs_grad: frozenset[str], forms: Forms) -> Kept:
    """What the wanted gradients read, and no more."""
    wanted = _wanted(scales, needs_grad)
    rows, up, down, down_bias, preact, factors, groups, form, _ = kept
    return Kept(
        rows if wanted.up else None,
        up if wanted.rows else None,
        down,
        down_bias if wanted.scales else None,
        preact,
        factors,
        groups,
        form,
        forms,
    )


def _named(gradients: Gradients, forms: Forms) -> Grads:
    """In the forms of what they are the gradients of."""
    x, scales, up, down, up_bias, down_bias = gradients
    grads: dict[str, Gradient] = {}
    if x is not None:
        grads["x"] = x if x.shape == forms.x_shape else x.view(forms.x_shape)
    if scales is not None and forms.scales_shape is not None:
        grads[forms.scales] = scales.to(forms.scales_dtype).view(forms.scales_shape)
    if up is not None:
        grads["fc1.weight"] = up
    if down is not None:
        grads["fc2.weight"] = down
    if up_bias is not None:
        grads["fc1.bias"] = up_bias.to(forms.up_bias)
    if down_bias is not None:
        grads["fc2.bias"] = down_bias.to(forms.down_bias)
    return grads
