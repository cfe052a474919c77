"""A cache of captures: by a key of values that are no tensors, and behind it by guards on the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .stats import counts

_guards: Any = torch._C._dynamo.guards  # torch's own look at tensors before it runs compiled code
_MANY = 256
_MANY_ROWS = 2**20  # beyond which other kernels might be needed
ENOUGH = 2  # captures with different numbers of rows


class State(Enum):
    """How far calls of a form are on the way to a replay. The text is what ``explain()`` says of the last call."""

    NEW = "no call yet"
    SEEN = "captured when a call of this form comes again"
    CAPTURED = "replayed"
    UNSUPPORTED = "not replayed"


NEW, SEEN, CAPTURED, UNSUPPORTED = State  # found at once; Python 3.11 looks up members of an enum by a function


class Capture(Protocol):
    """What is captured of calls, or of backwards, of one form."""

    @classmethod
    def joined(cls: type[T], several: Sequence[Any], /) -> T | None:
        """For any number of rows, from captures with different ones; None where they do not fit together."""


T = TypeVar("T", bound=Capture)


class Entry(Generic[T]):
    """What is known of calls, or of backwards, of one form.

    Attributes:
        capture: what is replayed; None unless the state is CAPTURED.
        refusal: why they cannot be replayed; None unless the state is UNSUPPORTED.
    """

    __slots__ = ("capture", "refusal", "state")

    def __init__(self) -> None:
        self.state: State = NEW
        self.capture: T | None = None
        self.refusal: str | None = None

    def __str__(self) -> str:
        return self.state.value if self.refusal is None else f"{self.state.value}: {self.refusal}"


class GuardedEntry(Entry[T]):
    """The entry for tensors of one form: types, dtypes, devices, shapes, strides, gradients, modes of dispatch."""

    __slots__ = ("dynamic_rows", "matches")

    def __init__(self, tensors: Sequence[Tensor], dynamic_rows: DynamicRows[T]) -> None:
        super().__init__()
        self.matches = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.dynamic_rows = dynamic_rows

    def see(self) -> bool:
        """Takes note of a call that is about to run; returns whether it is to be captured.

        The first of a form is not, unless one with another number of rows came before.
        """
        if self.state is not NEW or self.dynamic_rows.is_collecting:
            return True
        self.state = SEEN
        if self.dynamic_rows.state is NEW:
            self.dynamic_rows.state = SEEN
        return False

    def file(self, rows: int, capture: T) -> None:
        """Files what was captured, and with it those that differ in the number of rows alone."""
        counts.captured += 1
        self.state, self.capture = CAPTURED, capture
        self.dynamic_rows.add(rows, capture)

    def refuse(self, reason: str) -> None:
        """Files why calls of the form cannot be replayed."""
        counts.refused(reason)
        self.state, self.refusal = UNSUPPORTED, reason
        self.dynamic_rows.captures = None


class DynamicRows(Entry[T]):
    """The forms that differ in the number of rows alone: in the first size of the tensors that have as many rows.

    Attributes:
        captures: by number of rows, while they are collected; None once they are not.
        contexts: of the captured forwards.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: int) -> None:
        super().__init__()
        self._long = [i for i, t in enumerate(tensors) if t.dim() and t.shape[0] == rows]
        sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
        for i in self._long:
            sizes[i][0] = None
        strides = [list(t.stride()) for t in tensors]
        guards = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._matches = guards.check
        self.captures: dict[int, T] | None = {}
        self.contexts: list[Any] = []

    def matches(self, tensors: Sequence[Tensor], rows: int) -> bool:
        """Whether the form of these is one of them."""
        return self._matches(*tensors) and all([tensors[i].shape[0] == rows for i in self._long])

    @property
    def is_collecting(self) -> bool:
        """Whether a call is to be captured although there was none with its number of rows."""
        return self.state is SEEN and self.captures is not None

    def add(self, rows: int, capture: T) -> None:
        """Adds what was captured for a number of rows; once there is enough, makes a capture for any number."""
        if self.captures is None:
            return
        self.captures[rows] = capture
        if len(self.captures) == ENOUGH:
            self.capture, self.captures = capture.joined(list(self.captures.values())), None
            if self.capture is not None:
                self.state = CAPTURED


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
                return dynamic if entry.state is SEEN and dynamic.state is CAPTURED else entry
        if self._count >= _MANY:
            self.clear()
        dynamic = self._dynamic_rows(key, tensors, rows)
        if dynamic.state is CAPTURED and 0 < rows < _MANY_ROWS:
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
