"""The door to the routed experts of a layer as a whole: without gradients as one call, or in steps that keep some.

A traced tensor takes another way, as at the kernel door: each function is then the custom op of its name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import ArgumentError
from ..fuser.tracing import is_traced, named_range
from . import kernels
from . import routing as rows_of
from .inference import Experts, RoutedMlp, one_call
from .kernels import Layout
from .kernels import traced_routed as traced
from .routing import Routing

__all__ = ["Experts", "Forward", "RoutedMlp", "oriented", "product", "routed_mlp", "routed_mlp_forward"]


class Forward(NamedTuple):
    """The output [T, H], and what a backward needs: the routing, the weights of the rows, the pre-activation."""

    y: Tensor
    routing: Routing
    scales: Tensor
    pre: Tensor | None


def routed_mlp(experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[T, H]: the weighted sums over the experts of each token, without gradients."""
    if type(x) is not Tensor and is_traced(x):
        return traced.routed_mlp(experts, x, top_k_index, top_k_weights)
    _check(experts, x, top_k_index, top_k_weights)
    call = one_call(experts) if x.is_cuda else None
    if call is None:
        return _in_steps(experts, x, top_k_index, top_k_weights, keep_pre=False).y
    if not torch._C._autograd._profiler_enabled():
        return call(x, top_k_index, top_k_weights)
    with named_range("fusible::RoutedMLP"):
        return call(x, top_k_index, top_k_weights)


def routed_mlp_forward(experts: Experts, x: Tensor, index: Tensor, weights: Tensor, keep_pre: bool) -> Forward:
    """Routing, rows to the experts, both linears and what is between them, the sum back."""
    if type(x) is not Tensor and is_traced(x):
        own = rows_of.refusal(index, experts.up.shape[0], x.dtype) is None
        made = traced.routed_mlp_forward(experts, x, index, weights, keep_pre, own)
        y, counts, order, place, scales, pre = made
        return Forward(y, Routing(counts, order, place, own), scales, pre if keep_pre else None)
    _check(experts, x, index, weights)
    return _in_steps(experts, x, index, weights, keep_pre)


def _check(e: Experts, x: Tensor, index: Tensor, weights: Tensor) -> None:
    """What makes the addresses safe to read: a model may have moved or replaced a tensor since its last call.

    It runs at every call, so it reads attributes and calls nothing.
    """
    tensors = ("top_k_index", index), ("top_k_weights", weights), ("up", e.up), ("down", e.down)
    for name, tensor in (*tensors, ("up_bias", e.up_bias), ("down_bias", e.down_bias)):
        if tensor is not None and tensor.device != x.device:
            raise ArgumentError(f"{name}: expected a tensor on {x.device}, where x is, got one on {tensor.device}")
    groups, columns, features = e.up.shape[0], e.up.shape[2 if e.transposed else 1], x.shape[1]
    for name, bias, width in (("up_bias", e.up_bias, columns), ("down_bias", e.down_bias, features)):
        if bias is not None and bias.shape != (groups, width):
            raise ArgumentError(f"{name}: expected shape {[groups, width]}, got {list(bias.shape)}")


def _in_steps(experts: Experts, x: Tensor, index: Tensor, weights: Tensor, keep_pre: bool) -> Forward:
    e = experts
    with named_range("fusible::dispatch"):
        routing = rows_of.route(index, e.up.shape[0], x.dtype, weights.contiguous())
        scales = rows_of.scales_of(routing, weights)
        rows, sizes = rows_of.permute(x, routing, fill=False), routing.split_sizes
    with named_range("fusible::GroupedMLP"):
        how: dict[str, Any] = {"bias": e.up_bias, "keep_pre": keep_pre, "interior": True}
        up, down = oriented(e.up, e.transposed), oriented(e.down, e.transposed)
        pre, hidden = kernels.grouped_linear_activation(rows, up, sizes, e.spec, **how)
        del rows
        y = product(routing, Layout.NT, hidden, down, bias=e.down_bias, row_scale=scales)
        del hidden
    with named_range("fusible::combine"):
        return Forward(rows_of.unpermute(y, routing), routing, scales, pre)


def product(routing: Routing, layout: Layout, rows: Tensor, weight: Tensor, **how: Any) -> Tensor:
    """Rows of no expert may be anything where our own kernels sum, which do not read them."""
    columns = weight.shape[1 if layout is Layout.NT else 2]
    out = rows.new_empty((rows.shape[0], columns)) if routing.is_native else None
    result = kernels.grouped_gemm(layout, rows, weight, routing.split_sizes, out=out, **how)
    assert isinstance(result, Tensor)
    return result


def oriented(weight: Tensor, transposed: bool) -> Tensor:
    """As [E, out, in]."""
    return weight.mT if transposed else weight
