"""What runs did, and replays built from it: of one run for its number of rows, of two for any number.

The library declares which numbers of a launch count rows, and how large a workspace is for how many. Of allocations
the first size may vary. A second run with another number of rows tells whether a number only happens to be theirs. If
the runs differ in anything else, each capture is replayed for its own number of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .program import Launches, Replay, Shape, View

LARGE = 2**20  # bytes of allocations that stay apart: an allocator finds those of the calls before


class Recorder(AbstractContextManager[Any], Protocol):
    """The library's own capture, which notes the launches of its thread while it is entered.

    Attributes:
        refusal: why they cannot be made again, or None.
    """

    refusal: str | None

    def allocated(self, address: int, nbytes: int, per_row: bool, /) -> bool:
        """Tells of memory; returns whether it is a workspace whose size the library was asked for just before."""

    def launches(self, other: Any, positions: list[int], /) -> Launches | None:
        """What is captured here, for its number of rows; with another capture, for any. None if they do not fit.

        ``positions`` says of each allocation which address a run is given for it; -1: it is a piece of scratch memory.
        """


class Library(Protocol):
    """A compiled library whose launches can be captured."""

    def Capture(self, given: list[tuple[int, int]], rows: int, /) -> Recorder:
        """A capture of a run on tensors with these first addresses and sizes in bytes."""


class Allocation(NamedTuple):
    """Memory that a run allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_workspace: bool

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


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
    recorder: Recorder
    given: int
    allocations: tuple[Allocation, ...]
    made: tuple[ValueRef | None, ...]
    kept: tuple[ValueRef | None, ...]
    written: tuple[int, ...]

    def form(self) -> tuple[Any, ...]:
        """What does not depend on the number of rows."""
        refs = [ref and ref._replace(shape=()) for ref in (*self.made, *self.kept)]
        return self.given, self.written, len(self.made), refs, [each[1:] for each in self.allocations]


def replay_of(captures: Sequence[Captured]) -> Replay | None:
    """From one capture, for its number of rows; from two, for any. None where they do not fit together."""
    first, second = captures[0], captures[-1]
    if first is not second and first.form() != second.form():
        return None
    try:
        return _Joined(first, second).replay()
    except _DoNotFitError:
        return None


class _DoNotFitError(Exception):
    """Captures with different numbers of rows differ in more than the rows."""


class _Joined:
    """Two captures that differ in the number of rows alone, or one twice."""

    def __init__(self, first: Captured, second: Captured) -> None:
        self.first, self.second, self.views = first, second, list[View]()
        self.apart = dict[int, Shape]()
        for ref, other in zip((*first.made, *first.kept), (*second.made, *second.kept), strict=True):
            if ref and other and ref.origin is Origin.ALLOCATION:
                self.apart[ref.number] = self.shape(ref.shape, other.shape)
        for number, (a, b) in enumerate(zip(first.allocations, second.allocations, strict=True)):
            if a.nbytes >= LARGE and not a.is_workspace and number not in self.apart:
                self.apart[number] = self.shape(a.shape, b.shape)
        self.positions = {number: first.given + i for i, number in enumerate(self.apart)}

    def replay(self) -> Replay:
        first, second = self.first, self.second
        positions = [self.positions.get(number, -1) for number in range(len(first.allocations))]
        launches = first.recorder.launches(second.recorder, positions)
        if launches is None:
            raise _DoNotFitError
        made = tuple(map(self.position, first.made, second.made))
        kept: Any = tuple(map(self.position, first.kept, second.kept))
        allocations = tuple([self.allocation(*each) for each in self.apart.items()])
        scratch = self.scratch(launches) if len(self.positions) < len(positions) else None
        any_rows = first is not second
        return Replay(launches, allocations, scratch, tuple(self.views), made, kept, first.written, any_rows)

    def shape(self, a: tuple[int, ...], b: tuple[int, ...]) -> Shape:
        """That of a tensor for any number of rows, from those in the two captures."""
        rows, other = self.first.rows, self.second.rows
        if a == b:
            return Shape(a, 0)
        if not rows or a[1:] != b[1:] or a[0] % rows or a[0] // rows * other != b[0]:
            raise _DoNotFitError
        return Shape(a, a[0] // rows)

    def position(self, ref: ValueRef | None, other: ValueRef | None) -> int | None:
        """That of a result in a replay; a view is added to ``views``."""
        if ref is None or other is None or ref.origin is Origin.GIVEN:
            return ref and ref.number
        if ref.origin is Origin.ALLOCATION:
            return self.positions[ref.number]
        shape = self.shape(ref.shape, other.shape)
        self.views.append(View(ref.number, shape, ref.strides, ref.start, ref.origin is Origin.DETACHED))
        return self.first.given + len(self.positions) + len(self.views) - 1

    def allocation(self, number: int, shape: Shape) -> Callable[..., Tensor]:
        """Allocates memory that stays apart."""
        _, dtype, device, _ = self.first.allocations[number]
        if self.first is not self.second:
            return partial(_allocate, shape, dtype, device)
        return _allocation_like(shape.sizes, dtype, device)

    def scratch(self, launches: Launches) -> Callable[..., Tensor]:
        """Allocates one piece of memory for all that nobody sees."""
        device = self.first.allocations[0].device
        if self.first is not self.second:
            return partial(_allocate_scratch, launches, device)
        return _allocation_like((launches.scratch_bytes(self.first.rows),), torch.uint8, device)


def _allocation_like(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Allocates such tensors, like one without memory, which is the fastest way to say it."""
    one = torch.empty((), dtype=dtype, device=device)
    like = one.view(sizes) if all(n == 1 for n in sizes) else one.expand(sizes)
    one.untyped_storage().resize_(0)
    return partial(torch.empty_like, like)


def _allocate(shape: Shape, dtype: torch.dtype, device: torch.device, rows: int) -> Tensor:
    return torch.empty(shape.at(rows), dtype=dtype, device=device)


def _allocate_scratch(launches: Launches, device: torch.device, rows: int) -> Tensor:
    return torch.empty(launches.scratch_bytes(rows), dtype=torch.uint8, device=device)
