"""Identities and addresses of hundreds of tensors, read at every call: by one call of the extension, or one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from ...fuser.contract.torch_private import address_function
from .extension import is_built, library


def has_objects(values: Mapping[str, Any], names: tuple[str, ...], objects: tuple[Any, ...]) -> bool:
    """Whether a dictionary has exactly these objects under these names; False for other mappings."""
    if type(values) is not dict:
        return False
    if is_built():
        is_same: bool = library().has_objects(values, names, objects)
        return is_same
    return False not in map(is_, map(values.get, names), objects)


def addresses_of(tensors: Sequence[Tensor]) -> list[int] | bytes:
    """The addresses of tensors that have data, to be compared with others that this function has returned."""
    if address_function and is_built():
        addresses: bytes = library().tensor_addresses(tensors, address_function)
        return addresses
    return list(map(Tensor.data_ptr, tensors))
