"""What is asked of hundreds of tensors at every call: the extension in one call where it is built, else each alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ...fuser.contract.torch_private import address_function, form_functions, tensor_guards
from .extension import is_built, library


def has_objects(values: Mapping[str, Any], names: tuple[str, ...], objects: tuple[Any, ...]) -> bool:
    """Whether a dictionary has these very objects under these names; False of other mappings, which may do more."""
    if type(values) is not dict:
        return False
    if is_built():
        is_same: bool = library().has_objects(values, names, objects)
        return is_same
    return False not in map(is_, map(values.get, names), objects)


def form_guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Checks whether tensors are of the form of these, as torch's guards do.

    Where all are alike, they do so for the first, and the extension compares the others with it: that takes a fifth of
    the time. The guards see besides what counts for all, such as autocast, and that a first one is torch's own tensor.
    """
    of_torch = {*map(type, tensors)} <= {Tensor, Parameter} and not any([t.is_nested for t in tensors])
    if form_functions and is_built() and of_torch and library().are_alike(tensors, form_functions):
        return partial(_are_like, tensor_guards(tensors[:1]), library().are_alike)
    return tensor_guards(tensors)


def _are_like(guards: Callable[..., bool], are_alike: Callable[..., bool], *tensors: Tensor) -> bool:
    return guards(tensors[0]) and are_alike(tensors, form_functions)


def addresses_of(tensors: Sequence[Tensor]) -> list[int] | bytes:
    """The addresses of tensors that have data, to be compared with others that this function has returned."""
    if address_function and is_built():
        addresses: bytes = library().tensor_addresses(tensors, address_function)
        return addresses
    return list(map(Tensor.data_ptr, tensors))
