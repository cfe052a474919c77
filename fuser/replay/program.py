"""What a half of an op made a device do, kept to be done again for tensors of the same form: its launches in one call.

The first call of a form runs as it is, the second is watched, and from the third on only memory is allocated and the
launches are made again, with the addresses of the new tensors. There is one code for all of them, that of the op; a
replay is what is left of it once every decision that depends on forms has been taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_guards: Any = torch._C._dynamo.guards  # torch's own look at tensors before it runs compiled code
_MANY = 256
SEEN = "seen once"
_MANY_ROWS = 2**20  # beyond which other kernels might be needed
ENOUGH = 3  # runs of different lengths: two make a line, the third tells whether it is one


class Launches(Protocol):
    """Launches that a library can make again: its own object, with a method of the name of each launch to add one."""

    def run(self, addresses: list[int], rows: int, stream: int, /) -> None: ...


class Line(NamedTuple):
    """A number that grows with the rows of a call."""

    offset: int
    factor: int

    def at(self, rows: int) -> int:
        return self.offset + self.factor * rows


class View(NamedTuple):
    """A given tensor in another shape, or detached as it is; ``start`` counts elements from its first."""

    place: int
    shape: tuple[Line, ...]
    strides: tuple[int, ...]
    start: int
    detached: bool

    def of(self, tensors: Sequence[Tensor], rows: int) -> Tensor:
        tensor = tensors[self.place]
        if self.detached:
            return tensor.detach()
        shape = [offset + factor * rows for offset, factor in self.shape]
        return tensor.as_strided(shape, self.strides, tensor.storage_offset() + self.start)


class Replay(NamedTuple):
    """Launches, and the room that they need.

    Attributes:
        rooms: make the tensors that somebody else will see, and large ones, in the places behind those that are given.
        scratch: makes one piece of memory for all others; None where there are none.
        views: tensors behind these, of given ones.
        made: the places of the results; None for one that is None.
        kept: the places of what else the run leaves.
        written: the places of given tensors that are written.
        any_rows: whether it can be run for any number of rows, which then says how much room is made.
    """

    launches: Launches | None
    rooms: tuple[Callable[..., Tensor], ...]
    scratch: Callable[..., Tensor] | None
    views: tuple[View, ...]
    made: tuple[int | None, ...]
    kept: tuple[int, ...]
    written: tuple[int, ...]
    any_rows: bool

    def run(self, given: list[Tensor], addresses: list[int], rows: int, stream: int) -> list[Tensor]:
        """The given tensors and those that were made, in their places; ``addresses`` are those of the given ones."""
        how = (rows,) if self.any_rows else ()
        for room in self.rooms:
            made = room(*how)
            given.append(made)
            addresses.append(made.data_ptr())
        if self.scratch is not None:
            scratch = self.scratch(*how)
            addresses.append(scratch.data_ptr())
        if self.launches is not None:
            self.launches.run(addresses, rows, stream)
        if self.written:
            torch.autograd.graph.increment_version([given[i] for i in self.written])
        for view in self.views:
            given.append(view.of(given, rows))
        return given


class Entry:
    """What is known of a form of tensors: types, dtypes, devices, shapes, strides, gradients, and modes of dispatch."""

    __slots__ = ("family", "matches", "what")

    def __init__(self, tensors: Sequence[Tensor], family: Family) -> None:
        self.matches = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.family = family
        self.what: Any = None


class Family:
    """Forms that differ in the number of rows alone: in the first size of the tensors that are as long.

    Attributes:
        what: what is known of all of them: of any number of rows, once some have been recorded.
        records: of forms of different lengths, while they are collected; None once they are not.
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
        self._matches, self.what, self.seen = guards.check, None, False
        self.records: dict[int, Any] | None = {}
        self.contexts: list[Any] = []

    def matches(self, tensors: Sequence[Tensor], rows: int) -> bool:
        """Whether the form of these is one of them."""
        return self._matches(*tensors) and all([tensors[i].shape[0] == rows for i in self._long])

    @property
    def is_collecting(self) -> bool:
        """Whether a call shall be recorded although none of its own rows came before."""
        return self.seen and self.records is not None

    def add(self, rows: int, record: Any, join: Callable[[list[Any]], Any]) -> None:
        """Adds what was recorded of a form, None if it was refused; once there is enough, it is known of all."""
        if self.records is None or record is None:
            self.records = None
            return
        self.records[rows] = record
        if len(self.records) == ENOUGH:
            self.what, self.records = join(list(self.records.values())), None


class Forms:
    """Entries, by a key for what is no tensor. Where they are many, those of an earlier time go."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], list[Entry]] = {}
        self._families: dict[tuple[Any, ...], list[Family]] = {}
        self._count = 0

    def entry(self, key: tuple[Any, ...], tensors: Sequence[Tensor], rows: int) -> Entry | Family:
        """The one for these, or their family where that is known; a new one, of which nothing is, if there was none."""
        for entry in self._entries.get((key, rows), ()):
            if entry.matches(*tensors):
                return entry.family if entry.what is SEEN and entry.family.what is not None else entry
        if self._count >= _MANY:
            self.clear()
        family = self._family(key, tensors, rows)
        if family.what is not None and 0 < rows < _MANY_ROWS:
            return family
        self._count += 1
        self._entries.setdefault((key, rows), []).append(Entry(tensors, family))
        return self._entries[key, rows][-1]

    def _family(self, key: tuple[Any, ...], tensors: Sequence[Tensor], rows: int) -> Family:
        families = self._families.setdefault(key, [])
        for family in families:
            if family.matches(tensors, rows):
                return family
        families.append(Family(tensors, rows))
        return families[-1]

    def clear(self) -> None:
        """Forgets them all."""
        self._entries.clear()
        self._families.clear()
        self._count = 0


def is_replayed_for(tensor: Tensor) -> bool:
    """Whether work for such tensors is launched, rather than done."""
    return tensor.device.type == "cuda"


def stream_of(tensor: Tensor) -> int:
    """The address of the current stream of a tensor's device, without an object for it; 0 where there are none."""
    return int(torch._C._cuda_getCurrentRawStream(tensor.get_device())) if tensor.device.type == "cuda" else 0


def aligned(addresses: list[int]) -> bool:
    """Whether every kernel can read there: some choose their way by the last bits of an address."""
    return not reduce(or_, addresses) & 15
