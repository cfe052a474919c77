"""Codecs: conversion of a kernel's parameters and results to a schema of ``torch.library``, which has no unions.

A parameter of a kernel has a type hint of :data:`CODECS`, an enum, or a frozen dataclass or named tuple of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, reduce
from itertools import islice
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from ...formats.weight_only import WeightOnly, in_words, of_words
from ...programs.program import Program, parse
from ..problems.gemm import Matrices, OperandPair, Operands


def itself(value: Any) -> Any:
    return value


class Codec(NamedTuple):
    """The conversion of values of one annotation to a schema and back.

    Attributes:
        schemas: the types there, of a parameter with ``{}`` for its name.
        flatten: a parameter as one value for each of these; a result as the op returns it.
        unflatten: the inverse, of values one by one.
    """

    schemas: tuple[str, ...]
    flatten: Callable[[Any], Any] = lambda value: (value,)
    unflatten: Callable[..., Any] = itself

    @property
    def has_default(self) -> bool:
        """Whether a call may leave the parameter out, so that it follows the required ones."""
        return any("=" in schema for schema in self.schemas)

    def named(self, name: str) -> Codec:
        """The codec of a parameter with this name."""
        return self._replace(schemas=tuple(schema.format(name) for schema in self.schemas))

    def with_default(self) -> Codec:
        """The codec of an optional parameter, whose default is None, or False for a bool.

        Trailing values that are defaults are left out of a call.
        """
        (schema,) = self.schemas
        default = False if schema.startswith("bool ") else None
        return Codec((f"{schema}={default}",), self.flatten, lambda value=default: value)


def _listed(matrices: Matrices | None) -> tuple[list[Tensor] | None]:
    """A stacked tensor travels as a list of one. So a list of one matrix travels as a stack of one."""
    if matrices is None or isinstance(matrices, Tensor):
        return (None if matrices is None else [matrices],)
    return ([matrices[0].unsqueeze(0)] if len(matrices) == 1 else list(matrices),)


def _unlisted(tensors: list[Tensor] | None) -> Matrices | None:
    return tensors[0] if tensors is not None and len(tensors) == 1 else tensors


def _stacked(operands: Operands) -> tuple[Tensor | None]:
    """Separate operands travel as a stack of the largest shape, with zeros for operands that nothing reads."""
    if operands is None or isinstance(operands, Tensor):
        return (operands,)
    present = [t for t in operands if t is not None]
    if not present:
        return (None,)
    if len(operands) == 1:
        return (present[0].unsqueeze(0),)
    dtype, shape = (
        reduce(torch.promote_types, [t.dtype for t in present]),
        [*map(max, zip(*[t.shape for t in present], strict=True))],
    )
    zeros = present[0].new_zeros(shape, dtype=dtype)
    return (torch.stack([zeros if t is None else _as_large(t.to(dtype), shape) for t in operands]),)


def _as_large(operand: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeats rows that are the same for all, and adds columns of zeros."""
    if operand.dim() == 2:
        operand = F.pad(operand, (0, shape[-1] - operand.shape[-1]))
    return operand.expand(*shape)


def _factor(factor: float | Tensor | None) -> tuple[float | None, Tensor | None]:
    return (None, factor) if isinstance(factor, Tensor) else (factor, None)


def _unfactored(number: float | None, tensor: Tensor | None) -> float | Tensor | None:
    return number if tensor is None else tensor


def _pair(a: Tensor | None = None, b: Tensor | None = None) -> OperandPair | None:
    """Values at the end that are their defaults are left out of a call."""
    return None if a is None or b is None else OperandPair(a, b)


_NAMES = {Tensor: "Tensor", bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "ScalarType"}
CODECS: dict[Any, Codec] = {
    **{annotation: Codec((f"{name} {{}}",)) for annotation, name in _NAMES.items()},
    **{annotation | None: Codec((f"{name}? {{}}",)) for annotation, name in _NAMES.items()},
    int | torch.SymInt: Codec(("SymInt {}",)),
    Matrices: Codec(("Tensor[] {}",), _listed, _unlisted),
    Matrices | None: Codec(("Tensor[]? {}",), _listed, _unlisted),
    Operands: Codec(("Tensor? {}",), _stacked),
    tuple[float, ...]: Codec(("float[] {}=[]",), lambda numbers: (list(numbers),), tuple),
    WeightOnly: Codec(("str {}",), lambda format: (in_words(format),), of_words),
    Program: Codec(("str {}",), lambda program: (program.text,), parse),
    Program | None: Codec(("str? {}",), lambda program: (program and program.text,), lambda text: text and parse(text)),
    OperandPair | None: Codec(("Tensor? {}_a=None", "Tensor? {}_b=None"), lambda pair: pair or (None, None), _pair),
    float | Tensor | None: Codec(("float? {}", "Tensor? {}s"), _factor, _unfactored),
}
OUT = Codec(("Tensor(a!)[] {}",), _listed, _unlisted)
NO_RESULT = Codec((), lambda result: None)


def codec_of(annotation: Any) -> Codec:
    """The codec of a parameter. Fields of a named tuple that have a default do not cross.

    Raises:
        TypeError: no schema declares it.
    """
    if annotation in CODECS:
        return CODECS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Codec(("str {}",), lambda member: (member.value,), annotation)
    if hasattr(annotation, "_fields"):
        return _codec_of_fields(annotation, omitted=annotation._field_defaults)
    if not is_dataclass(annotation):
        raise TypeError(f"a kernel cannot take a parameter of type {annotation}: it has no codec")
    codec = _codec_of_fields(annotation)
    return codec._replace(unflatten=cache(codec.unflatten))


def _codec_of_fields(annotation: Any, omitted: Collection[str] = ()) -> Codec:
    """Field by field; those that are omitted have their defaults on the other side."""
    hints = {name: hint for name, hint in get_type_hints(annotation).items() if name not in omitted}
    codecs = {name: codec_of(hint).named(name) for name, hint in hints.items()}
    return Codec(
        tuple(schema for codec in codecs.values() for schema in codec.schemas),
        lambda fields: [value for name, codec in codecs.items() for value in codec.flatten(getattr(fields, name))],
        lambda *values: annotation(**unflattened(codecs, values)),
    )


def unflattened(codecs: dict[str, Codec], values: Iterable[Any]) -> dict[str, Any]:
    """Parameters by name, of the values that cross the schema for them."""
    left, arguments = iter(values), {}
    for name, codec in codecs.items():
        alone = codec.unflatten is itself
        arguments[name] = next(left) if alone else codec.unflatten(*islice(left, len(codec.schemas)))
    return arguments


def codec_of_result(annotation: Any, omitted: Collection[str] = ()) -> Codec:
    """The codec of a tensor, or of a tuple or named tuple of tensors. None is converted to an empty tensor of bool.

    Args:
        omitted: the last fields of a named tuple, which the schema does not have.
    """
    members = getattr(annotation, "_fields", get_args(annotation) if get_origin(annotation) is tuple else ())
    count = len([member for member in members if member not in omitted])
    if not count:
        return Codec(("Tensor",), itself)
    build = annotation if hasattr(annotation, "_fields") else lambda *tensors: tensors
    return Codec(
        ("Tensor",) * count,
        lambda tensors: _filled(tensors[:count]),
        lambda *tensors: build(*map(_or_none, tensors)),
    )


def _filled(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    like = next(tensor for tensor in tensors if tensor is not None)
    return tuple([like.new_empty(0, dtype=torch.bool) if tensor is None else tensor for tensor in tensors])


def _or_none(tensor: Tensor) -> Tensor | None:
    return None if tensor.dtype is torch.bool else tensor
