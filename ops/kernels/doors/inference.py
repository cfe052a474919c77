"""The door to the routed experts of a layer in one call: of the extension, without gradients; of PyTorch, if short."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...values.activation_spec import ActivationSpec
from ..dispatch import allows
from ..extension import address
from ..hopper import routed_mlp as backend
from ..hopper.gemm import NAME
from ..hopper.routed_mlp import Experts, RoutedMlp
from ..pytorch import routed_mlp as short_layer
from ..pytorch import short_mlp
from ..pytorch.routed_mlp import Order
from ..pytorch.routed_mlp import backward as backward_on_cpu
from ..pytorch.short_mlp import Gradients, Kept, WantedGradients
from ..pytorch.short_mlp import backward as rows_backward_on_cpu

__all__ = [
    "Experts",
    "Gradients",
    "Kept",
    "Order",
    "RoutedMlp",
    "WantedGradients",
    "backward_on_cpu",
    "on_cpu",
    "one_call",
    "rows_backward_on_cpu",
    "rows_on_cpu",
]


class _Prepared(NamedTuple):
    """A call for the weights at some addresses, or None, and what else was true of them."""

    call: RoutedMlp | None
    form: tuple[Any, ...]
    spec: ActivationSpec


_SHORT = "short calls on a CPU"  # which no switch names, so they run where none is given
_prepared: dict[tuple[int, ...], _Prepared] = {}
_MOST = 4096  # layers, or addresses of their weights


def one_call(experts: Experts) -> RoutedMlp | None:
    """The call, where the kernels of the extension take these experts; made once for weights that stay where they are.

    Memory that was freed, or a view, may be of another dtype or pitch at the same address.
    """
    if not allows(NAME):
        return None
    up, down, up_bias, down_bias, spec, transposed = experts
    addresses = up.data_ptr(), down.data_ptr(), address(up_bias), address(down_bias)
    form: tuple[Any, ...] = up.shape, up.dtype, up.stride(), down.shape, down.dtype, down.stride(), transposed
    for bias in (up_bias, down_bias):
        form += (None,) if bias is None else (bias.shape, bias.dtype, bias.stride())
    prepared = _prepared.get(addresses)
    if prepared is None or prepared.form != form or prepared.spec != spec:
        if len(_prepared) >= _MOST:
            _prepared.clear()
        prepared = _Prepared(RoutedMlp(experts) if backend.refusal(experts) is None else None, form, spec)
        _prepared[addresses] = prepared
    return prepared.call


def on_cpu(
    experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> tuple[Tensor, Kept, Order] | None:
    """The output of a short call on a CPU, where nothing but the host takes time, and what a backward reads."""
    if not allows(_SHORT) or short_layer.refusal(x, top_k_index, experts.up, experts.down) is not None:
        return None
    return short_layer.run(x, top_k_index, top_k_weights, experts)


def rows_on_cpu(
    experts: Experts, x: Tensor, split_sizes: Tensor, scales: Tensor | None, *, after: bool
) -> tuple[Tensor, Kept] | None:
    """The same of a few rows, sorted by expert, and what a backward reads; ``after``: the second linear is scaled."""
    if not allows(_SHORT):
        return None
    return short_mlp.run(x, experts, split_sizes, scales, after)
