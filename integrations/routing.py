"""Tokens to experts and back under autograd: rows sorted by expert, and the sum over the experts of a token.

Everything stays on the device, and every row is written once or summed in a fixed order, forward and backward: a row
that is spread over k experts gets its gradient as a sum over those k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops import routing as rows_of
from ..ops.routing import Routing, route

__all__ = ["Routing", "combine", "dispatch", "route"]


def dispatch(x: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The rows [S, H] and the weights [S] of the experts, from those of the tokens, [T, H] and [T, k]."""
    rows, scales = _Dispatch.apply(x, weights, *_parts(routing))  # type: ignore[no-untyped-call]
    return rows, scales


def combine(rows: Tensor, routing: Routing) -> Tensor:
    """[T, H]: the sum of each token's rows [S, H], summed in float32 at least and rounded once."""
    combined: Tensor = _Combine.apply(rows, *_parts(routing))  # type: ignore[no-untyped-call]
    return combined


def _parts(routing: Routing) -> tuple[Any, ...]:
    return routing[:4]


def _kept(ctx: Any) -> Routing:
    counts, order, place = ctx.saved_tensors
    return Routing(counts, order, place, ctx.own)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, *parts: Any) -> Any:
        ctx.save_for_backward(*parts[:3])
        ctx.own, ctx.dtype = parts[3], weights.dtype
        ctx.set_materialize_grads(False)
        routing = Routing(*parts)
        return rows_of.permute(x, routing), rows_of.by_row(weights, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor | None, dscales: Tensor | None) -> Any:
        routing, dx, dweights = _kept(ctx), None, None
        if drows is not None and ctx.needs_input_grad[0]:
            dx = rows_of.unpermute(drows, routing)
        if dscales is not None and ctx.needs_input_grad[1]:
            dweights = rows_of.by_slot(dscales, routing, ctx.dtype)
        return dx, dweights, *[None] * 4


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parts: Any) -> Tensor:
        ctx.save_for_backward(*parts[:3])
        ctx.own = parts[3]
        return rows_of.unpermute(rows, Routing(*parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return rows_of.permute(dy, _kept(ctx)), *[None] * 4
