"""What runs did, in numbers, and replays from them: of one run for its own form, of several for any number of rows.

Nothing that depends on the rows is guessed from one run. Each number of the launches and of the memory must be the same
in runs of different lengths, or lie with theirs on a line; what lies on none is not replayed but at its own length. A
number must not leave its line elsewhere, by being rounded, say: the sizes of workspaces are on lines (test_replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .program import Launches, Line, Replay, View

Patch = tuple[int, int, int, int, int]
"""Of a launch: which argument, which element if it is a list, the place of a tensor, the distance from its start, and
how much farther for each row; of a number the place is -1."""

_ALIGNMENT = 256  # of pieces of scratch memory, as torch's own allocations are
_ROW_BLOCK = 128  # rows that pieces of scratch memory grow by, so that they stay aligned; as csrc/fusible/launches.h
_LARGE = 2**20  # bytes of rooms that stay apart: an allocator finds those of the calls before


class Library(Protocol):
    """A compiled library whose launches can be recorded."""

    LAUNCHES: dict[str, list[int]]  # name -> which arguments are addresses or lists of them

    def Launches(self) -> Launches: ...


class Room(NamedTuple):
    """Memory that a run allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Launch(NamedTuple):
    """A launch; sources: argument, element, number of a given tensor or (from -1 down) of a room, distance."""

    name: str
    arguments: tuple[Any, ...]
    sources: tuple[tuple[int, int, int, int], ...]


class Place(NamedTuple):
    """What a result is: a tensor that was given, itself, detached or as a view; or a room."""

    kind: str
    number: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    start: int = 0


class Record(NamedTuple):
    """What a run did. Holds no tensors."""

    rows: int
    library: Library | None
    given: int
    rooms: tuple[Room, ...]
    launches: tuple[Launch, ...]
    made: tuple[Place | None, ...]
    kept: tuple[Place, ...]
    written: tuple[int, ...]


def replay_of(records: Sequence[Record]) -> Replay | None:
    """Of one record, to be run at its own length; of several, at any. None where they do not fit together."""
    try:
        return _Joined(records).replay()
    except _Misfit:
        return None


class _Misfit(Exception):
    """Records of different lengths differ in more than numbers on a line."""


class _Joined:
    """Records of one form but for the length, as one."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records, self.first, self.any_rows = records, records[0], len(records) > 1
        self.same([(r.library is None, r.given, r.written, [(m.dtype, m.device) for m in r.rooms]) for r in records])
        self.same([[(name, len(given), sources) for name, given, sources in r.launches] for r in records])

    def same(self, values: Sequence[Any]) -> None:
        if any(value != values[0] for value in values):
            raise _Misfit

    def line(self, values: Sequence[Any]) -> Line:
        """The line on which numbers lie, one of each record."""
        rows = [record.rows for record in self.records]
        if all(value == values[0] for value in values):
            return Line(values[0], 0)
        if any(type(value) is not int for value in values):
            raise _Misfit
        factor = (values[1] - values[0]) // (rows[1] - rows[0])
        line = Line(values[0] - factor * rows[0], factor)
        if factor < 0 or any(line.at(n) != value for n, value in zip(rows, values, strict=True)):
            raise _Misfit
        return line

    def lines(self, values: Sequence[Sequence[int]]) -> tuple[Line, ...]:
        self.same([len(value) for value in values])
        return tuple(map(self.line, zip(*values, strict=True)))

    def replay(self) -> Replay:
        views, rooms = list[View](), dict[int, tuple[Line, ...] | None]()
        for one in self.places():
            if one[0].kind == "room":
                rooms[one[0].number] = self.lines([place.shape for place in one])
        for number, room in enumerate(self.first.rooms):
            if room.nbytes >= _LARGE and number not in rooms:
                rooms[number] = None
        order = {number: self.first.given + i for i, number in enumerate(rooms)}
        first_view = self.first.given + len(rooms)
        made = self.settled([record.made for record in self.records], order, first_view, views)
        kept: Any = self.settled([record.kept for record in self.records], order, first_view, views)
        offsets, size = self.scratch(order)
        makers = tuple([self.maker(number, shape) for number, shape in rooms.items()])
        device = self.first.rooms[0].device if self.first.rooms else None
        scratch = None if device is None or size == (0, 0) else self.memory((_padded(size),), torch.uint8, device)
        launches = self.launches(order, offsets, first_view)
        return Replay(launches, makers, scratch, tuple(views), made, kept, self.first.written, self.any_rows)

    def places(self) -> Iterator[tuple[Place, ...]]:
        """Those of each result, one of each record."""
        for group in ([r.made for r in self.records], [r.kept for r in self.records]):
            self.same([[None if p is None else p._replace(shape=()) for p in places] for places in group])
            yield from (places for places in zip(*group, strict=True) if places[0] is not None)

    def settled(
        self, results: Sequence[Sequence[Place | None]], order: dict[int, int], first_view: int, views: list[View]
    ) -> tuple[int | None, ...]:
        """The places of results in a replay, and the views among them."""
        settled: list[int | None] = []
        for places in zip(*results, strict=True):
            place = places[0]
            if place is None or place.kind == "given":
                settled.append(place and place.number)
            elif place.kind == "room":
                settled.append(order[place.number])
            else:
                shape = self.lines([p.shape for p in places if p is not None])
                settled.append(first_view + len(views))
                views.append(View(place.number, shape, place.strides, place.start, place.kind == "detached"))
        return tuple(settled)

    def nbytes(self, number: int) -> Line:
        return self.line([record.rooms[number].nbytes for record in self.records])

    def maker(self, number: int, shape: tuple[Line, ...] | None) -> Callable[..., Tensor]:
        room = self.first.rooms[number]
        if shape is None:
            return self.memory((self.nbytes(number),), torch.uint8, room.device)
        return self.memory(shape, room.dtype, room.device)

    def memory(self, shape: tuple[Line, ...], dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
        """Allocates such tensors, for a number of rows or, of one record, for its own."""
        if self.any_rows:
            return partial(_allocate, shape, dtype, device)
        sizes = [line.offset for line in shape]
        one = torch.empty((), dtype=dtype, device=device)
        like = one.view(sizes) if all(n == 1 for n in sizes) else one.expand(sizes)
        one.untyped_storage().resize_(0)
        return partial(torch.empty_like, like)  # like one without memory, which is the fastest way to say it

    def scratch(self, order: dict[int, int]) -> tuple[dict[int, Line], Line]:
        """Where each of the other rooms begins in one piece of memory, and its size, both for whole blocks of rows."""
        offsets, size = dict[int, Line](), Line(0, 0)
        for number in range(len(self.first.rooms)):
            if number not in order:
                offsets[number], (own, factor) = size, self.nbytes(number)
                own, factor = -(-max(own, 0) // _ALIGNMENT) * _ALIGNMENT, -(-factor * _ROW_BLOCK // _ALIGNMENT)
                size = Line(size.offset + own, size.factor + factor * _ALIGNMENT // _ROW_BLOCK)
        return offsets, size

    def launches(self, order: dict[int, int], offsets: dict[int, Line], scratch: int) -> Launches | None:
        library = self.first.library
        if library is None:
            return None
        launches = library.Launches()
        for several in zip(*[record.launches for record in self.records], strict=True):
            name, arguments, sources = several[0]
            patches: list[Patch] = []
            for position, element, source, distance in sources:
                place = source if source >= 0 else order.get(~source, scratch)
                offset, factor = offsets.get(~source, Line(0, 0))
                patches.append((position, element, place, distance + offset, factor))
            for position, values in enumerate(zip(*[launch.arguments for launch in several], strict=True)):
                if position not in library.LAUNCHES[name] and (line := self.line(values)).factor:
                    patches.append((position, 0, -1, *line))
            getattr(launches, name)(patches, *arguments)
        return launches


def _padded(size: Line) -> Line:
    """A size for rows in whole blocks as one that is enough for any number of them."""
    return size if not size.factor else Line(size.offset + size.factor * (_ROW_BLOCK - 1), size.factor)


def _allocate(shape: tuple[Line, ...], dtype: torch.dtype, device: torch.device, rows: int) -> Tensor:
    return torch.empty([line.at(rows) for line in shape], dtype=dtype, device=device)
