"""What a forward leaves for its backward: tensors out of a tree of named tuples, and back into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .buffers import CallerBuffer


class Source(Protocol):
    """Where tensors come from that autograd saves one by one."""

    @property
    def number(self) -> int:
        """How many there are."""

    def tensors(self) -> Sequence[Tensor]:
        """Those of now, for a forward that is replayed."""

    def joined(self, tensors: Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
        """What ``bwd`` is given for those that autograd has saved."""


@dataclass(slots=True)
class Apart:
    """Many tensors in a ``Saved``, of which ``bwd`` is given one value, as :meth:`Source.joined` makes it.

    They are saved as they are, so that autograd sees a change of each, and hooks on saved tensors see parameters.
    """

    source: Source
    tensors: Sequence[Tensor]


class _Hole:
    """Stands where a tensor was."""


_HOLE, _LENT, _APART = _Hole(), _Hole(), _Hole()
_VALUE_TYPES = frozenset({type(None), bool, int, float, str})


def pack(saved: Any) -> tuple[list[Tensor], list[Tensor], list[Apart], Any]:
    """Takes the tensors out, those that are lent and those that are saved apart by themselves; then comes the rest."""
    tensors: list[Tensor] = []
    lent: list[Tensor] = []
    apart: list[Apart] = []
    return tensors, lent, apart, _take((saved,), tensors, lent, apart)[0]


def unpack(rest: Any, tensors: Iterable[Tensor], lent: Iterable[Tensor], joined: Iterable[Any] = ()) -> Any:
    """Puts the tensors back; ``joined`` are the values of those that were saved apart."""
    return _put((rest,), iter(tensors), iter(lent), iter(joined))[0]


def tensors_of(saved: Any) -> list[Tensor]:
    """The tensors alone."""
    tensors, _, apart, _ = pack(saved)
    return [*tensors, *[tensor for each in apart for tensor in each.tensors]]


def _take(saved: Iterable[Any], tensors: list[Tensor], lent: list[Tensor], apart: list[Apart]) -> list[Any]:
    """The items without their tensors. One loop for all of them: calls cost more than what is done here."""
    rest: list[Any] = []
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
            rest.append(_like(item, _take(item, tensors, lent, apart)))
        elif isinstance(item, dict):
            rest.append(dict(zip(item, _take(item.values(), tensors, lent, apart), strict=True)))
        elif isinstance(item, CallerBuffer):
            lent.append(item.tensor)
            rest.append(_LENT)
        else:
            rest.append(item)
    return rest


def _put(rest: Iterable[Any], tensors: Iterator[Tensor], lent: Iterator[Tensor], joined: Iterator[Any]) -> list[Any]:
    """The inverse of :func:`_take`."""
    saved: list[Any] = []
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
            saved.append(_like(item, _put(item, tensors, lent, joined)))
        elif isinstance(item, dict):
            saved.append(dict(zip(item, _put(item.values(), tensors, lent, joined), strict=True)))
        else:
            saved.append(item)
    return saved


def _like(old: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """The items in place of the old ones, as its own type if that is a named tuple."""
    return tuple.__new__(type(old), items) if hasattr(old, "_fields") else tuple(items)
