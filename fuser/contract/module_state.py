"""The state that a module's results depend on besides the arguments: its tensors, and its attributes by value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .config import constant

M = TypeVar("M", bound=nn.Module)
_COMPARABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, Enum, type)
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {
    "_compiled_call_impl",
    "attribute_version",
    "decision_version",
}


class Attributes(NamedTuple):
    """The names of a module's attributes: comparable values, and tensors. ``opaque``: there are others.

    Among the values are those that its classes set, as it may be given its own.
    """

    values: tuple[str, ...]
    tensors: tuple[str, ...]
    opaque: bool


def attributes(module: nn.Module, path: str = "", base: type[nn.Module] = nn.Module) -> Attributes:
    """The attributes of a module or, along a dotted path, of one inside it; without those that ``base`` has too."""
    for name in path.split(".")[:-1]:
        module = module._modules[name]  # type: ignore[assignment]
    ignored = _INTERNAL | getattr(type(module), "untraced", frozenset())
    children = [id(child) for child in module._modules.values() if child is not None]
    by_name: dict[str, object] = {k: v for k, v in vars(module).items() if k not in ignored and id(v) not in children}
    by_name |= {**module._parameters, **module._buffers}
    by_name = {name: None for name in _set_by_classes(type(module), base) if name not in ignored} | by_name
    tensors = tuple([name for name, value in by_name.items() if isinstance(value, Tensor)])
    values = tuple([name for name, value in by_name.items() if is_comparable(value)])
    return Attributes(values, tensors, len(values) + len(tensors) < len(by_name))


def _set_by_classes(kind: type[nn.Module], base: type[nn.Module]) -> list[str]:
    """The names of constants that a class, or one between it and ``base``, sets."""
    names = dict.fromkeys([name for cls in kind.__mro__ if not issubclass(base, cls) for name in vars(cls)])
    return [name for name in names if not hasattr(base, name) and _is_constant(getattr(kind, name))]


def _is_constant(value: object) -> bool:
    return is_comparable(value) and not isinstance(value, (type, list, set, Mapping))


def with_tensors(module: M, tensors: Mapping[str, Tensor], path: str = "") -> M:
    """A copy of a module that has exactly these tensors, by dotted name."""
    children = module._modules.items()
    copies = {k: m if m is None else with_tensors(m, tensors, f"{path}{k}.") for k, m in children}
    copy_of = {id(m): copies[k] for k, m in children if m is not None}
    copy, untraced = object.__new__(type(module)), getattr(type(module), "untraced", ())
    for name, value in vars(module).items():
        if name in untraced:
            vars(copy)[name] = type(value)()
        elif id(value) in copy_of:
            vars(copy)[name] = copy_of[id(value)]
        else:
            vars(copy)[name] = tensors.get(path + name, None if isinstance(value, Tensor) else value)
    for kind in ("_parameters", "_buffers"):
        vars(copy)[kind] = {name: tensors.get(path + name) for name in vars(module)[kind]}
    vars(copy)["_modules"] = copies
    return copy


def is_comparable(value: object) -> bool:
    """Whether two such values can be compared by their contents."""
    if isinstance(value, _COMPARABLE):
        return True
    if isinstance(value, (tuple, list, set, frozenset)):
        return all([is_comparable(v) for v in value])
    if isinstance(value, Mapping):
        return all([is_comparable(k) and is_comparable(v) for k, v in value.items()])
    return is_record(type(value)) and all([is_comparable(getattr(value, name)) for name in field_names(type(value))])


@constant
def is_record(cls: object) -> bool:
    """Whether it is a frozen dataclass."""
    return dataclasses.is_dataclass(cls) and bool(getattr(cls, "__dataclass_params__").frozen)  # noqa: B009


@constant
def field_names(cls: type) -> tuple[str, ...]:
    """The field names of a dataclass."""
    return tuple([field.name for field in dataclasses.fields(cls)])
