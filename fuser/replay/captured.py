"""What runs did, in numbers, and replays made from it: of one run for its own form, of several for any number of rows.

A size or an argument is taken to be affine in the number of rows only if captures with different numbers of rows agree.
If any number does not fit, each capture is replayed for its own number of rows alone. A number must not leave its line
elsewhere, by being rounded, say: the sizes of workspaces are on lines (test_replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .program import Affine, Launches, Replay, View

Patch = tuple[int, int, int, int, int]
"""Of a launch: which argument, which element if it is a list, the index of a tensor, the distance from its start, and
how much farther for each row; of a number the index is -1."""

_ALIGNMENT = 256  # of pieces of scratch memory, as torch's own allocations are
_ROW_BLOCK = 128  # rows that pieces of scratch memory grow by, so that they stay aligned; as csrc/fusible/launches.h
_LARGE = 2**20  # bytes of allocations that stay apart: an allocator finds those of the calls before


class Library(Protocol):
    """A compiled library whose launches can be recorded."""

    LAUNCHES: dict[str, list[int]]  # name -> which arguments are addresses or lists of them

    def Launches(self) -> Launches: ...


class Allocation(NamedTuple):
    """Memory that a run allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Launch(NamedTuple):
    """A launch; sources: argument, element, number of a given tensor or (from -1 down) of an allocation, distance."""

    name: str
    arguments: tuple[Any, ...]
    sources: tuple[tuple[int, int, int, int], ...]


class Origin(Enum):
    """Where a result comes from."""

    GIVEN = "a tensor that was given, itself"
    DETACHED = "a tensor that was given, detached"
    VIEW = "a view of a tensor that was given"
    ALLOCATION = "memory that the run has allocated"


class ValueRef(NamedTuple):
    """What a result is: a tensor that was given, itself, detached or as a view; or an allocation."""

    origin: Origin
    number: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    start: int = 0


class Captured(NamedTuple):
    """What a run did. Holds no tensors."""

    rows: int
    library: Library | None
    given: int
    allocations: tuple[Allocation, ...]
    launches: tuple[Launch, ...]
    made: tuple[ValueRef | None, ...]
    kept: tuple[ValueRef, ...]
    written: tuple[int, ...]


def replay_of(captures: Sequence[Captured]) -> Replay | None:
    """From one capture, for its number of rows; from several, for any. None where they do not fit together."""
    try:
        return _Generalised(captures).replay()
    except _NotAffine:
        return None


class _NotAffine(Exception):
    """Captures with different numbers of rows differ in more than numbers that are affine in the rows."""


class _Generalised:
    """Captures that differ in the number of rows alone, as one."""

    def __init__(self, captures: Sequence[Captured]) -> None:
        self.captures, self.first, self.any_rows = captures, captures[0], len(captures) > 1
        self.same(
            [(c.library is None, c.given, c.written, [(a.dtype, a.device) for a in c.allocations]) for c in captures]
        )
        self.same([[(name, len(given), sources) for name, given, sources in c.launches] for c in captures])

    def same(self, values: Sequence[Any]) -> None:
        if any(value != values[0] for value in values):
            raise _NotAffine

    def affine(self, values: Sequence[Any]) -> Affine:
        """The affine function of the rows that gives these numbers, one of each capture."""
        rows = [captured.rows for captured in self.captures]
        if all(value == values[0] for value in values):
            return Affine(values[0], 0)
        if any(type(value) is not int for value in values):
            raise _NotAffine
        factor = (values[1] - values[0]) // (rows[1] - rows[0])
        affine = Affine(values[0] - factor * rows[0], factor)
        if factor < 0 or any(affine.at(n) != value for n, value in zip(rows, values, strict=True)):
            raise _NotAffine
        return affine

    def affines(self, values: Sequence[Sequence[int]]) -> tuple[Affine, ...]:
        self.same([len(value) for value in values])
        return tuple(map(self.affine, zip(*values, strict=True)))

    def replay(self) -> Replay:
        views, allocations = list[View](), dict[int, tuple[Affine, ...] | None]()
        for one in self.refs():
            if one[0].origin is Origin.ALLOCATION:
                allocations[one[0].number] = self.affines([ref.shape for ref in one])
        for number, allocation in enumerate(self.first.allocations):
            if allocation.nbytes >= _LARGE and number not in allocations:
                allocations[number] = None
        order = {number: self.first.given + i for i, number in enumerate(allocations)}
        first_view = self.first.given + len(allocations)
        made = self.resolved([captured.made for captured in self.captures], order, first_view, views)
        kept: Any = self.resolved([captured.kept for captured in self.captures], order, first_view, views)
        offsets, size = self.scratch(order)
        makers = tuple([self.maker(number, shape) for number, shape in allocations.items()])
        device = self.first.allocations[0].device if self.first.allocations else None
        scratch = None if device is None or size == (0, 0) else self.memory((_padded(size),), torch.uint8, device)
        launches = self.launches(order, offsets, first_view)
        return Replay(launches, makers, scratch, tuple(views), made, kept, self.first.written, self.any_rows)

    def refs(self) -> Iterator[tuple[ValueRef, ...]]:
        """Those of each result, one of each capture."""
        for group in ([c.made for c in self.captures], [c.kept for c in self.captures]):
            self.same([[None if p is None else p._replace(shape=()) for p in refs] for refs in group])
            yield from (refs for refs in zip(*group, strict=True) if refs[0] is not None)

    def resolved(
        self, results: Sequence[Sequence[ValueRef | None]], order: dict[int, int], first_view: int, views: list[View]
    ) -> tuple[int | None, ...]:
        """The positions of results in a replay; views among them are added to ``views``."""
        resolved: list[int | None] = []
        for refs in zip(*results, strict=True):
            ref = refs[0]
            if ref is None or ref.origin is Origin.GIVEN:
                resolved.append(ref and ref.number)
            elif ref.origin is Origin.ALLOCATION:
                resolved.append(order[ref.number])
            else:
                shape = self.affines([p.shape for p in refs if p is not None])
                resolved.append(first_view + len(views))
                views.append(View(ref.number, shape, ref.strides, ref.start, ref.origin is Origin.DETACHED))
        return tuple(resolved)

    def nbytes(self, number: int) -> Affine:
        return self.affine([captured.allocations[number].nbytes for captured in self.captures])

    def maker(self, number: int, shape: tuple[Affine, ...] | None) -> Callable[..., Tensor]:
        allocation = self.first.allocations[number]
        if shape is None:
            return self.memory((self.nbytes(number),), torch.uint8, allocation.device)
        return self.memory(shape, allocation.dtype, allocation.device)

    def memory(self, shape: tuple[Affine, ...], dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
        """Allocates such tensors: for any number of rows or, from one capture, for its own."""
        if self.any_rows:
            return partial(_allocate, shape, dtype, device)
        sizes = [affine.offset for affine in shape]
        one = torch.empty((), dtype=dtype, device=device)
        like = one.view(sizes) if all(n == 1 for n in sizes) else one.expand(sizes)
        one.untyped_storage().resize_(0)
        return partial(torch.empty_like, like)  # like one without memory, which is the fastest way to say it

    def scratch(self, order: dict[int, int]) -> tuple[dict[int, Affine], Affine]:
        """Where the other allocations begin in one piece of memory, and its size, both for whole blocks of rows."""
        offsets, size = dict[int, Affine](), Affine(0, 0)
        for number in range(len(self.first.allocations)):
            if number not in order:
                offsets[number], (own, factor) = size, self.nbytes(number)
                own, factor = -(-max(own, 0) // _ALIGNMENT) * _ALIGNMENT, -(-factor * _ROW_BLOCK // _ALIGNMENT)
                size = Affine(size.offset + own, size.factor + factor * _ALIGNMENT // _ROW_BLOCK)
        return offsets, size

    def launches(self, order: dict[int, int], offsets: dict[int, Affine], scratch: int) -> Launches | None:
        library = self.first.library
        if library is None:
            return None
        launches = library.Launches()
        for several in zip(*[captured.launches for captured in self.captures], strict=True):
            name, arguments, sources = several[0]
            patches: list[Patch] = []
            for position, element, source, distance in sources:
                index = source if source >= 0 else order.get(~source, scratch)
                offset, factor = offsets.get(~source, Affine(0, 0))
                patches.append((position, element, index, distance + offset, factor))
            for position, values in enumerate(zip(*[launch.arguments for launch in several], strict=True)):
                if position not in library.LAUNCHES[name] and (affine := self.affine(values)).factor:
                    patches.append((position, 0, -1, *affine))
            getattr(launches, name)(patches, *arguments)
        return launches


def _padded(size: Affine) -> Affine:
    """A size for rows in whole blocks as one that is enough for any number of them."""
    return size if not size.factor else Affine(size.offset + size.factor * (_ROW_BLOCK - 1), size.factor)


def _allocate(shape: tuple[Affine, ...], dtype: torch.dtype, device: torch.device, rows: int) -> Tensor:
    return torch.empty([affine.at(rows) for affine in shape], dtype=dtype, device=device)
