"""What a forward leaves for its backward: tensors out of a tree of named tuples, and back into it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class _Hole:
    """Stands where a tensor was."""


_HOLE = _Hole()


def pack(saved: Any) -> tuple[list[Tensor], Any]:
    """Takes the tensors out: they go to ``save_for_backward``, the rest stays as it is."""
    tensors: list[Tensor] = []
    return tensors, _take(saved, tensors)


def unpack(rest: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Puts the tensors back."""
    return _put(rest, iter(tensors))


def tensors_of(saved: Any) -> list[Tensor]:
    """The tensors alone."""
    return pack(saved)[0]


def _take(saved: Any, tensors: list[Tensor]) -> Any:
    if isinstance(saved, Tensor):
        tensors.append(saved)
        return _HOLE
    if isinstance(saved, tuple):
        return _rebuilt(saved, [item if item is None else _take(item, tensors) for item in saved])
    if isinstance(saved, dict):
        return {key: _take(item, tensors) for key, item in saved.items()}
    return saved


def _put(rest: Any, tensors: Any) -> Any:
    if rest is _HOLE:
        return next(tensors)
    if isinstance(rest, tuple):
        return _rebuilt(rest, [item if item is None else _put(item, tensors) for item in rest])
    if isinstance(rest, dict):
        return {key: _put(item, tensors) for key, item in rest.items()}
    return rest


def _rebuilt(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """``like`` with other items, as its own type if that is a named tuple."""
    return tuple.__new__(type(like), items) if hasattr(like, "_fields") else tuple(items)
