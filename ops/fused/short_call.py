"""What a :class:`RoutedMLP` keeps of a short call on a CPU, and its gradients from that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads
from ..inference import Backward, Experts, Forward

_OF_FC2 = frozenset({"fc2.weight", "fc2.bias"})


class Saved(NamedTuple):
    """What no wanted gradient reads is None, or empty."""

    tokens: Tensor | None
    forward: Forward
    experts: Experts
    weights_dtype: torch.dtype
    bias_dtypes: tuple[torch.dtype, torch.dtype]


def gives(needs_grad: frozenset[str]) -> bool:
    """Whether :func:`gradients` gives these: one of them must lie behind the second linear."""
    return not needs_grad <= _OF_FC2


def saved(
    forward: Forward, tokens: Tensor, weights_dtype: torch.dtype, experts: Experts, needs_grad: frozenset[str]
) -> Saved:
    """What the wanted gradients read, and no more."""
    nothing = forward.scales.new_empty(0)
    up_bias, down_bias = (experts.up if bias is None else bias for bias in (experts.up_bias, experts.down_bias))
    read = experts._replace(
        up=experts.up if "x" in needs_grad else nothing,
        up_bias=None,
        down_bias=experts.down_bias if "top_k_weights" in needs_grad else None,
    )
    tokens_read = tokens if "fc1.weight" in needs_grad else None
    return Saved(tokens_read, forward._replace(y=nothing), read, weights_dtype, (up_bias.dtype, down_bias.dtype))


def gradients(saved: Saved, dy: Tensor, needs_grad: frozenset[str]) -> Grads:
    """By the names of the fused op."""
    up_bias, down_bias = saved.bias_dtypes
    of_weights, of_down = "top_k_weights" in needs_grad, "fc2.weight" in needs_grad
    backward = Backward(saved.forward, saved.tokens, saved.experts, dy, of_weights, of_down)
    grads: dict[str, Gradient] = {}
    if of_down:
        grads["fc2.weight"] = backward.down()
    if "fc1.weight" in needs_grad:
        grads["fc1.weight"] = backward.up()
    if of_weights:
        grads["top_k_weights"] = backward.weights(saved.weights_dtype)
    if "fc1.bias" in needs_grad:
        grads["fc1.bias"] = backward.up_bias(up_bias)
    if "fc2.bias" in needs_grad:
        grads["fc2.bias"] = backward.down_bias(down_bias)
    if "x" in needs_grad:  # at last: the weight that it reads is the one that the next forward reads first
        grads["x"] = backward.x()
    return grads
