"""A cache of captures: by a key of values that are no tensors, behind it by guards on the tensors, then by rows."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from torch import Tensor

from ..torch_private import tensor_guards
from .stats import counts

_MANY = 256
_MANY_ROWS = 2**20  # beyond which other kernels might be needed


class State(Enum):
    """How far calls of a form are on the way to a replay. The text is what ``explain()`` says of the last call."""

    NEW = "no call yet"
    SEEN = "captured when a call of this form comes again"
    CAPTURED = "replayed"
    UNSUPPORTED = "not replayed"


class Entry(NamedTuple):
    """What is known of calls: what is replayed for them, or why they cannot be replayed."""

    state: State
    captured: Any = None
    refusal: str | None = None

    def __str__(self) -> str:
        return self.state.value if self.refusal is None else f"{self.state.value}: {self.refusal}"


_NEW, _SEEN = Entry(State.NEW), Entry(State.SEEN)
_MISALIGNED = Entry(State.UNSUPPORTED, None, "an address is not aligned to 16 bytes")


class Form(dict[int, Entry]):
    """By the number of rows, calls that differ in it alone: in the first size of those tensors that have as many.

    Attributes:
        check: whether tensors are of the form but for the rows; ``exact``: with them, for numbers that have come.
        first: the first capture, for its own number of rows. The second, if they fit, makes one for any number of it.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: int) -> None:
        super().__init__()
        self._long = [i for i, t in enumerate(tensors) if t.dim() and t.shape[0] == rows]
        sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
        for i in self._long:
            sizes[i][0] = None
        self.check = tensor_guards(tensors, sizes, [list(t.stride()) for t in tensors])
        self.exact = {rows: tensor_guards(tensors)}
        self.first: Any = None
        self._any_rows, self._may_join = _NEW, True

    def has_rows(self, tensors: Sequence[Tensor], rows: int) -> bool:
        """Whether all of them have so many rows, once ``check`` has found nothing else wrong with them."""
        if any([tensors[i].shape[0] != rows for i in self._long]):
            return False
        if self._any_rows is _NEW and len(self.exact) < _MANY:
            self.exact[rows] = tensor_guards(tensors)
        return True

    def __missing__(self, rows: int) -> Entry:
        return self._any_rows if 0 < rows < _MANY_ROWS else _NEW

    def see(self, rows: int) -> bool:
        """Takes note of a call that is about to run; returns whether it is to be captured.

        The first is not, unless one with another number of rows came before, and they may become one capture.
        """
        if rows in self or (self and self._may_join):
            return True
        self._set(rows, _SEEN)
        return False

    def file(self, rows: int, captured: Any) -> None:
        """Files what was captured. The second time it becomes a capture for any number, if it fits the first."""
        counts.captured += 1
        if self.first is None:
            self.first = captured
        elif self._may_join:
            joined, self._may_join = self.first.joined(captured), False
            if joined is not None:
                self.clear()
                self._any_rows = Entry(State.CAPTURED, joined)
        self._set(rows, Entry(State.CAPTURED, captured))

    def refuse(self, rows: int, reason: str) -> None:
        """Files why such calls cannot be replayed."""
        counts.refused(reason)
        self._may_join = False
        self._set(rows, Entry(State.UNSUPPORTED, None, reason))

    def _set(self, rows: int, entry: Entry) -> None:
        if len(self) >= _MANY:
            self.clear()
        self[rows] = entry


class GuardedCache:
    """Forms by key. Where they are many, all are dropped."""

    def __init__(self) -> None:
        self._forms, self._count = dict[tuple[Any, ...], list[Form]](), 0

    def find(self, key: tuple[Any, ...], tensors: Sequence[Tensor], rows: int) -> tuple[Form, Entry, list[int]]:
        """The form of these tensors, a new one if there is none; what is known of this call; the addresses."""
        for form in self._forms.get(key, ()):
            check = form.exact.get(rows, form.check)
            if check(*tensors) and (check is not form.check or form.has_rows(tensors, rows)):
                break
        else:
            form = self._add(key, Form(tensors, rows))
        entry, addresses = form[rows], list(map(Tensor.data_ptr, tensors))
        if entry.refusal is None and reduce(or_, addresses) & 15:  # by its last bits some kernels choose their way
            entry = _MISALIGNED
        return form, entry, addresses

    def _add(self, key: tuple[Any, ...], form: Form) -> Form:
        if self._count >= _MANY:
            self._forms, self._count = {}, 0
        self._count += 1
        self._forms.setdefault(key, []).append(form)
        return form
