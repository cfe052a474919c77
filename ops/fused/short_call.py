"""What fused experts keep of a short call on a CPU, and its gradients from that."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads
from ..inference import Experts, Forward, Kept, Order, Wanted, backward_on_cpu

_OF_FC2 = frozenset({"fc2.weight", "fc2.bias"})
_NAMES = ("x", "top_k_weights", "fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")  # in the order of Wanted


class Saved(NamedTuple):
    """What no wanted gradient reads is None."""

    tokens: Tensor | None
    order: Order
    kept: Kept
    weights_dtype: torch.dtype
    bias_dtypes: tuple[torch.dtype | None, torch.dtype | None]


def gives(needs_grad: frozenset[str]) -> bool:
    """Whether :func:`gradients` gives these: one of them must lie behind the second linear."""
    return not needs_grad <= _OF_FC2


def saved(
    forward: Forward, tokens: Tensor, weights_dtype: torch.dtype, experts: Experts, needs_grad: frozenset[str]
) -> Saved:
    """What the wanted gradients read, and no more."""
    wanted, up_bias, down_bias = wanted_of(needs_grad), experts.up_bias, experts.down_bias
    dtypes = None if up_bias is None else up_bias.dtype, None if down_bias is None else down_bias.dtype
    tokens_read = tokens if wanted.up else None
    return Saved(tokens_read, forward.order, kept_for(forward.kept, wanted), weights_dtype, dtypes)


def kept_for(kept: Kept, wanted: Wanted) -> Kept:
    """Without what these gradients do not read."""
    down_bias = kept.down_bias if wanted.scales else None
    if wanted.rows and wanted.up and down_bias is kept.down_bias:
        return kept
    rows = kept.rows if wanted.up else None
    return kept._replace(rows=rows, up=kept.up if wanted.rows else None, down_bias=down_bias)


@lru_cache(maxsize=4096)
def wanted_of(needs_grad: frozenset[str]) -> Wanted:
    """By position."""
    return Wanted(*[name in needs_grad for name in _NAMES])


def gradients(saved: Saved, dy: Tensor, needs_grad: frozenset[str]) -> Grads:
    """By the names of the fused op."""
    tokens, order, kept, weights_dtype, (up_bias, down_bias) = saved
    x, weights, up, down, dup_bias, ddown_bias = backward_on_cpu(order, kept, tokens, dy, wanted_of(needs_grad))
    found = (
        x,
        None if weights is None else weights.to(weights_dtype),
        up,
        down,
        None if dup_bias is None else dup_bias.to(up_bias),
        None if ddown_bias is None else ddown_bias.to(down_bias),
    )
    grads: dict[str, Gradient] = {n: g for n, g in zip(_NAMES, found, strict=True) if g is not None}
    return grads
