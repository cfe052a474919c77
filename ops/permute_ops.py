"""The permutation of rows as custom ops, as :mod:`fusible.ops.kernels.custom_ops` has the kernel door.

A routing is its ``tokens_per_expert`` [E + 1], ``slot_of_row`` [S], ``row_of_slot`` [T, k] and ``is_native``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import routing
from .gathered_wgrad import gathered_wgrad, new_wgrad
from .kernels.custom_ops import obeying, register
from .routing import Routing


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


def fake_routing(index: Tensor, num_experts: int, is_native: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A routing without data."""
    whole = torch.int32 if is_native else torch.int64
    counts, order = index.new_empty(num_experts + 1, dtype=torch.int32), index.new_empty(index.numel(), dtype=whole)
    return counts, order, torch.empty_like(index, dtype=whole, memory_format=torch.contiguous_format)
