"""The state that a forward leaves for its backward: takes tensors out of a tree of named tuples, and puts them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .buffers import CallerBuffer


class Source(Protocol):
    """The source of tensors that autograd saves one by one."""

    @property
    def number(self) -> int:
        """The number of tensors."""

    def tensors(self) -> Sequence[Tensor]:
        """The current tensors, for a replayed forward."""

    def joined(self, tensors: Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
        """The value for ``bwd`` of the tensors that autograd has saved."""


@dataclass(slots=True)
class Apart:
    """Many tensors in a ``Saved`` that ``bwd`` gets as one value, made by :meth:`Source.joined`.

    They are saved individually, so that autograd detects a change of each, and saved-tensor hooks see parameters.
    """

    source: Source
    tensors: Sequence[Tensor]


class _Hole:
    """The placeholder of a tensor."""


_HOLE, _LENT, _APART = _Hole(), _Hole(), _Hole()
_VALUE_TYPES = frozenset({type(None), bool, int, float, str})


def pack(saved: object) -> tuple[list[Tensor], list[Tensor], list[Apart], object]:
    """Separates a ``Saved`` into its tensors, the lent ones, those saved one by one, and the rest."""
    tensors: list[Tensor] = []
    lent: list[Tensor] = []
    apart: list[Apart] = []
    return tensors, lent, apart, _take((saved,), tensors, lent, apart)[0]


def unpack(rest: object, tensors: Iterable[Tensor], lent: Iterable[Tensor], joined: Iterable[object] = ()) -> object:
    """Puts the tensors back; ``joined``: the values of those that were saved one by one."""
    return _put((rest,), iter(tensors), iter(lent), iter(joined))[0]


def tensors_of(saved: object) -> list[Tensor]:
    """The tensors of a ``Saved``."""
    tensors, _, apart, _ = pack(saved)
    return [*tensors, *[tensor for each in apart for tensor in each.tensors]]


def _take(saved: Iterable[Any], tensors: list[Tensor], lent: list[Tensor], apart: list[Apart]) -> list[object]:
    """The items without their tensors. A single loop, as calls would cost more than the work."""
    rest: list[object] = []
    for item in saved:
        kind = type(item)
        if kind in _VALUE_TYPES:
            rest.append(item)
        elif kind is Apart:
            apart.append(item)
            rest.append(_APART)
        elif kind is Tensor or isinstance(item, Tensor):
            tensors.append(item)
            rest.append(_HOLE)
        elif isinstance(item, tuple):
            like = kind if hasattr(kind, "_fields") else tuple
            rest.append(tuple.__new__(like, _take(item, tensors, lent, apart)))
        elif isinstance(item, dict):
            rest.append(dict(zip(item, _take(item.values(), tensors, lent, apart), strict=True)))
        elif isinstance(item, CallerBuffer):
            lent.append(item.tensor)
            rest.append(_LENT)
        else:
            rest.append(item)
    return rest


def _put(
    rest: Iterable[object], tensors: Iterator[Tensor], lent: Iterator[Tensor], joined: Iterator[object]
) -> list[object]:
    """The inverse of :func:`_take`."""
    saved: list[object] = []
    for item in rest:
        if item is _HOLE:
            saved.append(next(tensors))
        elif item is _LENT:
            saved.append(CallerBuffer(next(lent)))
        elif item is _APART:
            saved.append(next(joined))
        elif type(item) in _VALUE_TYPES:
            saved.append(item)
        elif isinstance(item, tuple):
            saved.append(tuple.__new__(type(item), _put(item, tensors, lent, joined)))
        elif isinstance(item, dict):
            saved.append(dict(zip(item, _put(item.values(), tensors, lent, joined), strict=True)))
        else:
            saved.append(item)
    return saved
