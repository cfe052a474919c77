"""A cache of captures: by a key of values that are no tensors, behind it by guards on the tensors, then by rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from torch import Tensor

from ..torch_private import tensor_guards
from .stats import counts

_MANY = 256
_MANY_ROWS = 2**20  # beyond which other kernels might be needed
REPLAYED = "replayed"


class Entry(NamedTuple):
    """What is known of calls: what is replayed for them, or why they cannot be replayed. Neither: not enough yet."""

    captured: Any = None
    refusal: str | None = None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"not replayed: {self.refusal}"
        return "captured when a call of this form comes again" if self.captured is None else REPLAYED


_SEEN, _MISALIGNED = Entry(), Entry(refusal="an address is not aligned to 16 bytes")


class Form(dict[int, Entry]):
    """By the number of rows, calls that differ in it alone: in the first size of those tensors that have as many."""

    def __init__(self, tensors: Sequence[Tensor], rows: int) -> None:
        super().__init__()
        self._long = [i for i, t in enumerate(tensors) if t.dim() and t.shape[0] == rows]
        sizes = [[None, *t.shape[1:]] if i in self._long else [*t.shape] for i, t in enumerate(tensors)]
        self._but_for_rows = tensor_guards(tensors, sizes, [list(t.stride()) for t in tensors])
        self.exact = {rows: tensor_guards(tensors)}  # whether tensors are of the form and have so many rows
        self.partner: Any = None  # the first capture, while the next may become one for any number of rows with it
        self._may_join, self._any_rows = True, _SEEN

    def __missing__(self, rows: int) -> Entry:
        return self._any_rows if 0 < rows < _MANY_ROWS else _SEEN

    def fits(self, tensors: Sequence[Tensor], rows: int) -> bool:
        """Whether tensors are of the form, for a number of rows that has not come, or long ago."""
        fits = self._but_for_rows(*tensors) and all([tensors[i].shape[0] == rows for i in self._long])
        if fits and len(self.exact) < _MANY:
            self.exact[rows] = tensor_guards(tensors)
        elif len(self) >= _MANY:
            self.clear()
        return fits

    def see(self, rows: int) -> bool:
        """Takes note of a call that is about to run; returns whether it is to be captured.

        The first is not, unless one with another number of rows came before, and they may become one capture.
        """
        comes_again = rows in self or bool(self and self._may_join)
        self.setdefault(rows, _SEEN)
        return comes_again

    def file(self, rows: int, captured: Any, is_for_any_rows: bool) -> None:
        """Files what was captured: for this number of rows, or for any in place of all that is there."""
        counts.captured += 1
        if is_for_any_rows:
            self.clear()
            self._any_rows = Entry(captured)
        else:
            self[rows] = Entry(captured)
        self.partner = captured if self._may_join and self.partner is None else None
        self._may_join = self.partner is not None

    def refuse(self, rows: int, reason: str) -> None:
        """Files why such calls cannot be replayed."""
        counts.unsupported[reason] += 1
        self.partner, self._may_join = None, False
        self[rows] = Entry(refusal=reason)


class GuardedCache:
    """Forms by key. Where they are many, all are dropped."""

    def __init__(self) -> None:
        self._forms = dict[tuple[Any, ...], list[Form]]()

    def find(self, key: tuple[Any, ...], tensors: Sequence[Tensor], rows: int) -> tuple[Form, Entry, list[int]]:
        """The form of these tensors, a new one if there is none; what is known of this call; the addresses."""
        for form in self._forms.get(key, ()):
            exact = form.exact.get(rows)
            if form.fits(tensors, rows) if exact is None else exact(*tensors):
                break
        else:
            if sum(map(len, self._forms.values())) >= _MANY:
                self._forms = {}
            form = Form(tensors, rows)
            self._forms.setdefault(key, []).append(form)
        entry, addresses = form[rows], list(map(Tensor.data_ptr, tensors))
        if entry.refusal is None and are_misaligned(addresses):
            entry = _MISALIGNED
        return form, entry, addresses


def are_misaligned(addresses: Sequence[int]) -> bool:
    """Whether not all are multiples of 16: by its last bits some kernels choose their way."""
    return bool(reduce(or_, addresses) & 15)
