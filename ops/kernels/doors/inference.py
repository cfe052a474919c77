"""The door to the routed experts of a layer in one call of the extension, without gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...values.activation_spec import ActivationSpec
from ..dispatch import allows
from ..extension import address
from ..hopper import routed_mlp as backend
from ..hopper.gemm import NAME
from ..hopper.routed_mlp import Experts, RoutedMlp

__all__ = ["Experts", "RoutedMlp", "one_call"]


class _Prepared(NamedTuple):
    """A call for the weights at given addresses, or None, and the other facts that it depends on."""

    call: RoutedMlp | None
    form: tuple[Any, ...]
    spec: ActivationSpec


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
