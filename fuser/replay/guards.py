"""A cache of captures: by a key of non-tensor values, then by guards on the tensors, then by rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from ..contract.torch_private import tensor_guards
from . import counts

_MANY = 256
_MANY_ROWS = 2**20  # beyond which other kernels might be needed
_MULTIPLES_FROM = 1024  # rows; of fewer, a size that does not grow with them may be a multiple
REPLAYED = "replayed"
address_bits: Callable[[Iterable[int]], int] = partial(reduce, or_)
"""Returns the bitwise or of addresses. Its last four bits are 0 if all are aligned to 16 bytes."""


class Captured(Protocol):
    """A captured call or backward."""

    @property
    def is_for_any_rows(self) -> bool:
        """Whether it fits any number of rows."""


E = TypeVar("E", bound=Captured)


class Refusal(str):
    """The reason why a call or a backward is not replayed; empty if no one would expect it."""


def described(entry: object) -> str:
    """The text of an explanation on an entry."""
    if isinstance(entry, Refusal):
        return entry and f"not replayed: {entry}"
    return "captured when a call of this form comes again" if entry is None else REPLAYED


class Form(dict[int, E | Refusal | None], Generic[E]):
    """Calls that differ only in the number of rows: in the first size of tensors that equals it, or a multiple.

    Entries by that number: the replay, or the refusal to replay; None: not known yet.

    Attributes:
        is_new: whether no call of the form has run yet.
        partner: the only capture so far, with which the next may become one for any number of rows.
        waiting: once two captures were for their own numbers alone, numbers that came once. A capture takes longer than
            a call, so that it is made for a number that comes again.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: int) -> None:
        super().__init__()
        most = _MANY if rows >= _MULTIPLES_FROM else 1
        multiples = [t.shape[0] // rows if t.dim() and rows and not t.shape[0] % rows else 0 for t in tensors]
        self._long = {i: multiple for i, multiple in enumerate(multiples) if 0 < multiple <= most}
        sizes = [[None, *t.shape[1:]] if i in self._long else [*t.shape] for i, t in enumerate(tensors)]
        self._guards = tensor_guards(tensors, sizes, [list(t.stride()) for t in tensors])
        self.is_new = True
        self.partner: E | None = None
        self.waiting: set[int] | None = None
        twice = len({*map(id, tensors)}) < len(tensors)
        self._for_any_rows: E | Refusal | None = Refusal("two of its tensors are one") if twice else None

    def __missing__(self, rows: int) -> E | Refusal | None:
        if not 0 < rows < _MANY_ROWS:
            return Refusal("no rows, or so many that other kernels might be needed")
        if self.waiting is None or rows in self.waiting:
            return self._for_any_rows
        if len(self.waiting) >= _MANY:
            self.waiting.clear()
        self.waiting.add(rows)
        return Refusal()

    def fits(self, tensors: Sequence[Tensor], rows: int) -> bool:
        """Whether tensors with this number of rows have the form."""
        if not self._guards(*tensors):
            return False
        for i, multiple in self._long.items():  # noqa: SIM110  # no generator: this is asked at every call
            if tensors[i].shape[0] != multiple * rows:
                return False
        return True

    def file(self, rows: int, entry: E | Refusal) -> None:
        """Files a capture or refusal: for this number of rows, or a capture for any number in place of all entries."""
        if isinstance(entry, Refusal):
            counts.unsupported[entry] += 1
        else:
            counts.captured += 1
            if entry.is_for_any_rows:
                self.clear()
                self._for_any_rows = entry
                return
        if len(self) >= _MANY:
            self.clear()
        if self.partner is not None and not isinstance(entry, Refusal):
            self.waiting = set()
        self.partner = None if self or isinstance(entry, Refusal) else entry
        self[rows] = entry


class GuardedCache(dict[tuple[object, ...], list[Form[E]]], Generic[E]):
    """Forms by key. If there are too many, all are dropped."""

    def find(self, key: tuple[object, ...], tensors: Sequence[Tensor], rows: int) -> tuple[Form[E], E | Refusal | None]:
        """The form of these tensors, a new one if there is none, and the entry of this call."""
        for form in self.get(key, ()):
            if form.fits(tensors, rows):
                break
        else:
            if sum(map(len, self.values())) >= _MANY:
                self.clear()
            form = Form(tensors, rows)
            self.setdefault(key, []).append(form)
        is_odd = address_bits(map(Tensor.data_ptr, tensors)) & 15
        return form, Refusal("an address is not aligned to 16 bytes") if is_odd else form[rows]
