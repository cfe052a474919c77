"""What a forward leaves for its backward: tensors out of a tree of named tuples, and back into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from .buffers import Lent


class _Hole:
    """Stands where a tensor was."""


_HOLE, _LENT = _Hole(), _Hole()
_PLAIN = frozenset({type(None), bool, int, float, str})


def pack(saved: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    """Takes the tensors out: they go to ``save_for_backward``, but for those that are lent; the rest stays as it is."""
    tensors: list[Tensor] = []
    lent: list[Tensor] = []
    return tensors, lent, _take((saved,), tensors, lent)[0]


def unpack(rest: Any, tensors: Iterable[Tensor], lent: Iterable[Tensor]) -> Any:
    """Puts the tensors back."""
    return _put((rest,), iter(tensors), iter(lent))[0]


def tensors_of(saved: Any) -> list[Tensor]:
    """The tensors alone."""
    return pack(saved)[0]


def _take(saved: Iterable[Any], tensors: list[Tensor], lent: list[Tensor]) -> list[Any]:
    """The items without their tensors. One loop for all of them: calls cost more than what is done here."""
    rest: list[Any] = []
    for item in saved:
        kind = type(item)
        if kind in _PLAIN:
            rest.append(item)
        elif kind is Tensor or isinstance(item, Tensor):
            tensors.append(item)
            rest.append(_HOLE)
        elif isinstance(item, tuple):
            rest.append(_like(item, _take(item, tensors, lent)))
        elif isinstance(item, dict):
            rest.append(dict(zip(item, _take(item.values(), tensors, lent), strict=True)))
        elif isinstance(item, Lent):
            lent.append(item.tensor)
            rest.append(_LENT)
        else:
            rest.append(item)
    return rest


def _put(rest: Iterable[Any], tensors: Iterator[Tensor], lent: Iterator[Tensor]) -> list[Any]:
    """The inverse of :func:`_take`."""
    saved: list[Any] = []
    for item in rest:
        if item is _HOLE:
            saved.append(next(tensors))
        elif item is _LENT:
            saved.append(Lent(next(lent)))
        elif type(item) in _PLAIN:
            saved.append(item)
        elif isinstance(item, tuple):
            saved.append(_like(item, _put(item, tensors, lent)))
        elif isinstance(item, dict):
            saved.append(dict(zip(item, _put(item.values(), tensors, lent), strict=True)))
        else:
            saved.append(item)
    return saved


def _like(old: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """The items in place of the old ones, as its own type if that is a named tuple."""
    return tuple.__new__(type(old), items) if hasattr(old, "_fields") else tuple(items)
