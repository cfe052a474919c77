"""A cache of captures: by a key of values that are no tensors, and behind it by guards on the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_guards: Any = torch._C._dynamo.guards  # torch's own look at tensors before it runs compiled code
_MANY = 256
_MANY_ROWS = 2**20  # beyond which other kernels might be needed
ENOUGH = 3  # captures with different numbers of rows: two make a line, the third tells whether it is one


class State(Enum):
    """What is known of tensors for which there is no capture."""

    NEW = "no call yet"
    SEEN = "one call, which was not captured"
    UNSUPPORTED = "cannot be replayed"


NEW, SEEN, UNSUPPORTED = State  # found at once; members of an enum are looked up by a function in Python 3.11


class GuardedEntry(Generic[T]):
    """The capture for tensors of one form: types, dtypes, devices, shapes, strides, gradients, modes of dispatch."""

    __slots__ = ("dynamic_rows", "matches", "state")

    def __init__(self, tensors: Sequence[Tensor], dynamic_rows: DynamicRows[T]) -> None:
        self.matches = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.dynamic_rows = dynamic_rows
        self.state: T | State = NEW


class DynamicRows(Generic[T]):
    """The forms that differ in the number of rows alone: in the first size of the tensors that have as many rows.

    Attributes:
        state: the capture for any number of rows, once it has been made from some with different numbers.
        captures: by number of rows, while they are collected; None once they are not.
        seen: whether there was a call.
        contexts: of the captured forwards.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: int) -> None:
        self._long = [i for i, t in enumerate(tensors) if t.dim() and t.shape[0] == rows]
        sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
        for i in self._long:
            sizes[i][0] = None
        strides = [list(t.stride()) for t in tensors]
        guards = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._matches, self.seen = guards.check, False
        self.state: T | State = NEW
        self.captures: dict[int, Any] | None = {}
        self.contexts: list[Any] = []

    def matches(self, tensors: Sequence[Tensor], rows: int) -> bool:
        """Whether the form of these is one of them."""
        return self._matches(*tensors) and all([tensors[i].shape[0] == rows for i in self._long])

    @property
    def is_collecting(self) -> bool:
        """Whether a call is to be captured although there was none with its number of rows."""
        return self.seen and self.captures is not None

    def add(self, rows: int, captured: Any, generalise: Callable[[list[Any]], T | None]) -> None:
        """Adds what was captured for a number of rows, or None; once there is enough, makes one for any number."""
        if self.captures is None or captured is None:
            self.captures = None
            return
        self.captures[rows] = captured
        if len(self.captures) == ENOUGH:
            joined, self.captures = generalise(list(self.captures.values())), None
            self.state = NEW if joined is None else joined


class GuardedCache(Generic[T]):
    """Entries by key and form. Where they are many, all are dropped."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], list[GuardedEntry[T]]] = {}
        self._dynamic: dict[tuple[Any, ...], list[DynamicRows[T]]] = {}
        self._count = 0

    def entry(self, key: tuple[Any, ...], tensors: Sequence[Tensor], rows: int) -> GuardedEntry[T] | DynamicRows[T]:
        """The entry for these, or that for any number of rows where it has a capture; a new one if there is none."""
        for entry in self._entries.get((key, rows), ()):
            if entry.matches(*tensors):
                dynamic = entry.dynamic_rows
                return dynamic if entry.state is SEEN and dynamic.state is not NEW else entry
        if self._count >= _MANY:
            self.clear()
        dynamic = self._dynamic_rows(key, tensors, rows)
        if dynamic.state is not NEW and 0 < rows < _MANY_ROWS:
            return dynamic
        self._count += 1
        self._entries.setdefault((key, rows), []).append(GuardedEntry(tensors, dynamic))
        return self._entries[key, rows][-1]

    def _dynamic_rows(self, key: tuple[Any, ...], tensors: Sequence[Tensor], rows: int) -> DynamicRows[T]:
        several = self._dynamic.setdefault(key, [])
        for each in several:
            if each.matches(tensors, rows):
                return each
        several.append(DynamicRows(tensors, rows))
        return several[-1]

    def clear(self) -> None:
        """Drops them all."""
        self._entries.clear()
        self._dynamic.clear()
        self._count = 0
