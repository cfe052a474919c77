"""A cache of captures: by a key of values that are no tensors, and behind it by guards on the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from ..torch_private import tensor_guards
from .program import Captured
from .stats import counts

_MANY = 256
_MANY_ROWS = 2**20  # beyond which other kernels might be needed


class State(Enum):
    """How far calls of a form are on the way to a replay. The text is what ``explain()`` says of the last call."""

    NEW = "no call yet"
    SEEN = "captured when a call of this form comes again"
    CAPTURED = "replayed"
    UNSUPPORTED = "not replayed"


NEW, SEEN, CAPTURED, UNSUPPORTED = State  # found at once; Python 3.11 looks up members of an enum by a function


class Entry:
    """What is known of calls, or of backwards, of one form.

    Attributes:
        captured: what is replayed; None unless the state is CAPTURED.
        refusal: why they cannot be replayed; None unless the state is UNSUPPORTED.
    """

    __slots__ = ("captured", "refusal", "state")

    def __init__(self) -> None:
        self.state: State = NEW
        self.captured: Captured | None = None
        self.refusal: str | None = None

    def __str__(self) -> str:
        return self.state.value if self.refusal is None else f"{self.state.value}: {self.refusal}"


class DynamicRows(Entry):
    """The entry for the forms that differ in the number of rows alone: in the first size of tensors with as many rows.

    Attributes:
        first: the first capture, for its own number of rows.
        is_collecting: whether it and one for another number may still become one for any.
    """

    __slots__ = ("_check", "_long", "first", "is_collecting")

    def __init__(self, tensors: Sequence[Tensor], rows: int) -> None:
        super().__init__()
        self._long = [i for i, t in enumerate(tensors) if t.dim() and t.shape[0] == rows]
        sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
        for i in self._long:
            sizes[i][0] = None
        self._check = tensor_guards(tensors, sizes, [list(t.stride()) for t in tensors])
        self.first: Captured | None = None
        self.is_collecting = True

    def matches(self, tensors: Sequence[Tensor], rows: int) -> bool:
        """Whether the form of these is one of them."""
        return self._check(*tensors) and all([tensors[i].shape[0] == rows for i in self._long])

    def serves(self, rows: int) -> bool:
        """Whether it has a capture that holds for this number of rows."""
        return self.state is CAPTURED and 0 < rows < _MANY_ROWS

    def add(self, captured: Captured) -> None:
        """Adds what was captured for a number of rows; the second time it becomes a capture for any number."""
        if self.first is None:
            self.first = captured
        elif self.is_collecting:
            self.captured, self.is_collecting = self.first.joined(captured), False
            self.state = self.state if self.captured is None else CAPTURED


class GuardedEntry(Entry):
    """The entry for tensors of one form: types, dtypes, devices, shapes, strides, gradients, modes of dispatch."""

    __slots__ = ("dynamic_rows", "matches")

    def __init__(self, tensors: Sequence[Tensor], dynamic_rows: DynamicRows) -> None:
        super().__init__()
        self.matches, self.dynamic_rows = tensor_guards(tensors), dynamic_rows

    def see(self) -> bool:
        """Takes note of a call that is about to run; returns whether it is to be captured.

        The first of a form is not, unless one with another number of rows came before.
        """
        dynamic = self.dynamic_rows
        if self.state is not NEW or (dynamic.state is SEEN and dynamic.is_collecting):
            return True
        self.state = SEEN
        if dynamic.state is NEW:
            dynamic.state = SEEN
        return False

    def file(self, captured: Captured) -> None:
        """Files what was captured, and with it those that differ in the number of rows alone."""
        counts.captured += 1
        self.state, self.captured = CAPTURED, captured
        self.dynamic_rows.add(captured)

    def refuse(self, reason: str) -> None:
        """Files why calls of the form cannot be replayed."""
        counts.refused(reason)
        self.state, self.refusal = UNSUPPORTED, reason
        self.dynamic_rows.is_collecting = False


class GuardedCache:
    """Entries by key and form. Where they are many, all are dropped."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drops them all."""
        self._entries: dict[tuple[Any, ...], list[GuardedEntry]] = {}
        self._dynamic: dict[tuple[Any, ...], list[DynamicRows]] = {}
        self._count = 0

    def entry(self, key: tuple[Any, ...], tensors: Sequence[Tensor], rows: int) -> GuardedEntry | DynamicRows:
        """The entry for these, or that for any number of rows where it has a capture; a new one if there is none."""
        for entry in self._entries.get((key, rows), ()):
            if entry.matches(*tensors):
                return entry.dynamic_rows if entry.state is SEEN and entry.dynamic_rows.serves(rows) else entry
        if self._count >= _MANY:
            self.clear()
        dynamic = self._dynamic_rows(key, tensors, rows)
        if dynamic.serves(rows):
            return dynamic
        self._count += 1
        self._entries.setdefault((key, rows), []).append(GuardedEntry(tensors, dynamic))
        return self._entries[key, rows][-1]

    def _dynamic_rows(self, key: tuple[Any, ...], tensors: Sequence[Tensor], rows: int) -> DynamicRows:
        entries = self._dynamic.setdefault(key, [])
        for entry in entries:
            if entry.matches(tensors, rows):
                return entry
        entries.append(DynamicRows(tensors, rows))
        return entries[-1]
