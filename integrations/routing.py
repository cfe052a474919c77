"""Tokens to experts and back: rows sorted by expert, and the sum over the experts of a token.

Everything stays on the device, and every row is written once or summed in a fixed order, forward and backward: a row
that is gathered k times gets its gradient as a sum over those k, read through the inverse permutation, not scattered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_SORTED_AT_ONCE = 4096  # by one block of threads, so torch does


class Routing(NamedTuple):
    """Which of the S = T k rows of the experts belongs to which of the k places of a token.

    Attributes:
        split_sizes: int32 [E]: how many rows each expert has. Ids from E on are of no expert; their rows come last.
        order: [S]: the place, token * k + slot, that each row was taken from.
        token: [S]: its token.
        place: [T, k]: the row that each place went to.
    """

    split_sizes: Tensor
    order: Tensor
    token: Tensor
    place: Tensor


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """The stable order by expert of the ids [T, k]."""
    ids, slots = _narrow(top_k_index.reshape(-1), num_experts), top_k_index.shape[-1]
    ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    starts = torch.searchsorted(ids, experts, out_int32=True)
    rows = torch.arange(order.shape[0], device=ids.device)
    place = torch.empty_like(order).scatter_(0, order, rows)
    return Routing(starts[1:] - starts[:-1], order, order // max(1, slots), place.view(-1, slots))


def dispatch(x: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The rows [S, H] and the weights [S] of the experts, from those of the tokens, [T, H] and [T, k]."""
    rows, scales = _Dispatch.apply(x, weights, *routing[1:])  # type: ignore[no-untyped-call]
    return rows, scales


def combine(rows: Tensor, routing: Routing) -> Tensor:
    """[T, H]: the sum of each token's rows [S, H], summed in float32 at least and rounded once."""
    combined: Tensor = _Combine.apply(rows, *routing[1:])  # type: ignore[no-untyped-call]
    return combined


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, order: Tensor, token: Tensor, place: Tensor) -> Any:
        ctx.save_for_backward(place)
        ctx.set_materialize_grads(False)
        return x.index_select(0, token), weights.reshape(-1).index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor | None, dscales: Tensor | None) -> Any:
        (place,) = ctx.saved_tensors
        dx = None if drows is None or not ctx.needs_input_grad[0] else _sum(drows, place)
        wanted = dscales is not None and ctx.needs_input_grad[1]
        dweights = dscales.index_select(0, place.view(-1)).view_as(place) if wanted and dscales is not None else None
        return dx, dweights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _sum(rows, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (token,) = ctx.saved_tensors
        return dy.index_select(0, token), None, None, None


def _sum(rows: Tensor, place: Tensor) -> Tensor:
    """[T, H]: of each token, the sum of the rows at its places."""
    tokens, slots = place.shape
    if not rows.is_cuda:  # without the gathered rows, whose memory costs a CPU ten times what the sum does
        return F.embedding_bag(place, rows, mode="sum")
    if slots == 1:
        return rows.index_select(0, place.view(-1))
    return rows.index_select(0, place.view(-1)).view(tokens, slots, rows.shape[1]).sum(1)


def _narrow(ids: Tensor, num_experts: int) -> Tensor:
    """The ids in few bits, which a radix sort of many on a GPU goes over one after the other."""
    large = ids.is_cuda and ids.shape[0] > _SORTED_AT_ONCE
    return ids.to(torch.int16) if large and num_experts < torch.iinfo(torch.int16).max else ids
