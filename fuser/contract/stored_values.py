"""Checks that kernels may read a tensor: its memory must hold its values."""

from __future__ import annotations

from torch import Tensor, nn

from .errors import ArgumentError
from .torch_private import disabled_torch_function
from .tracing import WITHOUT_DATA

_TENSOR_TYPES = (Tensor, nn.Parameter)


def stores_values(kind: type[Tensor]) -> bool:
    """Whether the memory of such tensors holds their values: the class does not define operations itself."""
    if kind in _TENSOR_TYPES or issubclass(kind, WITHOUT_DATA):
        return True
    function: object = kind.__torch_function__
    default = getattr(Tensor.__torch_function__, "__func__", None), disabled_torch_function
    return getattr(function, "__func__", function) in default and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def check_stores_values(name: str, tensor: Tensor, reader: str) -> None:
    """Raises :class:`ArgumentError` for an argument of ``reader`` that is a subclass with operations of its own.

    Nested tensors pass: which layouts it takes is asked elsewhere.
    """
    if not stores_values(type(tensor)) and not tensor.is_nested:
        raise _subclass_error(name, tensor, f"give {name}.to_local()").located(reader)


def check_parameter_stores_values(name: str, parameter: Tensor) -> None:
    """The same for a parameter."""
    if not stores_values(type(parameter)):
        hooks = "under fully_shard call the module that was sharded, whose hooks gather its parameters"
        raise _subclass_error(name, parameter, f"{hooks}; else give to_local()")


def _subclass_error(name: str, tensor: Tensor, cure_of_dtensors: str) -> ArgumentError:
    kind, rest = type(tensor).__name__, ", whose operations the kernels would bypass"
    if kind == "DTensor":
        rest = f" placed as {getattr(tensor, 'placements', ())}; {cure_of_dtensors}"
    elif kind == "AsyncCollectiveTensor":
        rest = f", which is still on its way; give {name}.wait()"
    return ArgumentError(f"{name}: expected a plain tensor, got a {kind}{rest}")
