"""The forward of routed experts, from tokens to tokens; and as one custom op where nothing needs a gradient.

The op takes tensors instead of ops. When it runs, it is one call of the extension, or the forward of a
:class:`GroupedMLP` that it builds around these tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser.contract.module_state import with_tensors
from ..basic.glu import Activated
from ..basic.scale import Scale
from ..grouped.grouped_linear import GroupedLinear
from ..kernels.doors import routing as permutation
from ..kernels.doors.inference import Experts, one_call
from ..kernels.doors.routing import Routing
from ..kernels.operators.custom_ops import kernel
from ..quantized.operands import GatheredTokens
from ..routed.call import RoutedCall
from ..values.activation_spec import ActivationSpec
from .grouped_mlp import GroupedMLP, MLPCall
from .inner_mlp import needs_of_experts


class Permuted(NamedTuple):
    """The output of experts, and the state of their backward."""

    y: Tensor
    routing: Routing
    mlp: GroupedMLP.Saved


def forward(mlp: GroupedMLP, num_experts: int, call: RoutedCall, scaled_by: tuple[str, ...]) -> Permuted:
    """Permutes the tokens to their experts, runs these, and sums their rows.

    Args:
        scaled_by: the keywords of ``mlp`` that are the routing weights.
    """
    routing, scales = call.route(num_experts)
    weights: dict[str, Any] = dict.fromkeys(scaled_by, scales)
    needs = needs_of_experts(call.needs_grad, scaled_by)
    rows = GatheredTokens.of(call.tokens(), routing)
    y, saved = mlp.run(rows, MLPCall(routing.split_sizes, **weights, needs_grad=needs))
    return Permuted(permutation.unpermute(y, routing), routing, saved)


def _new_output(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@kernel(_new_output)
def routed_mlp(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts) -> Tensor:
    """The weighted sums [T, H] of the chosen experts' outputs for the tokens ``x``, without gradients."""
    call = one_call(experts) if x.is_cuda else None
    if call is not None:
        return call(x, top_k_index, top_k_weights)
    mlp, num_experts = _mlp_of(experts), experts.up.shape[0]
    return forward(mlp, num_experts, RoutedCall(x, top_k_index, top_k_weights), ("out_scale_scales",)).y


def _mlp_of(e: Experts) -> GroupedMLP:
    tensors = {"fc1.weight": e.up, "fc1.bias": e.up_bias, "fc2.weight": e.down, "fc2.bias": e.down_bias}
    biases = e.up_bias is not None, e.down_bias is not None
    mlp: GroupedMLP = with_tensors(
        _form_of(e.up.shape, e.down.shape, e.up.dtype, *biases, e.spec, e.transposed),
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )
    return mlp


@cache
def _form_of(
    up: torch.Size,
    down: torch.Size,
    dtype: torch.dtype,
    up_bias: bool,
    down_bias: bool,
    spec: ActivationSpec,
    transposed: bool,
) -> GroupedMLP:
    """The experts on parameters without data."""
    fc1, fc2 = (
        GroupedLinear(
            shape[0],
            *(shape[1:] if transposed else shape[:0:-1]),
            bias=bias,
            device="meta",
            dtype=dtype,
            transposed_weight=transposed,
        )
        for shape, bias in ((up, up_bias), (down, down_bias))
    )
    parts: dict[str, Any] = {"fc1": fc1, "act": Activated(spec), "scale": None, "fc2": fc2, "out_scale": Scale()}
    return GroupedMLP(**parts)
