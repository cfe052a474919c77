"""Replays, built from recordings: of one run for its number of rows, of two for any.

The first call of a form runs by the code of its ops, the second is recorded, and from the third on only memory is
allocated and the launches are made again. A replay is what is left of that code once every decision that depends on
forms has been taken.

The library declares which numbers of a launch count rows, and how large a workspace is for how many. Of allocations
the first size may vary. A second run with another number of rows tells whether a number only happens to be theirs. If
the runs differ in anything else, each recording is replayed for its own number of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .capture import Launches, Memory, Recording
from .stats import counts

LARGE = 2**20  # bytes of allocations that stay apart: an allocator finds those of the calls before


class Sizes(NamedTuple):
    """The sizes of a tensor. If ``factor`` is not 0, they follow a first one, which is so many times the rows."""

    factor: int
    rest: tuple[int, ...]

    @classmethod
    def common(cls, a: tuple[int, ...], b: tuple[int, ...], rows: tuple[int, int]) -> Sizes | None:
        """For any number of rows, from the sizes in two recordings; None if they do not tell."""
        if a == b:
            return cls(0, a)
        if not rows[0] or a[1:] != b[1:] or a[0] % rows[0] or a[0] // rows[0] * rows[1] != b[0]:
            return None
        return cls(a[0] // rows[0], a[1:])


class Allocation(NamedTuple):
    """Makes a tensor: ``allocate()``, or ``allocate(factor * rows, *rest)`` if ``factor`` is not 0."""

    allocate: Callable[..., Tensor]
    factor: int
    rest: tuple[int, ...]

    @classmethod
    def of(cls, memory: Memory, sizes: Sizes) -> Allocation:
        like = torch.empty(0, dtype=memory.dtype, device=memory.device)  # the fastest way to say these
        return cls(like.new_empty, *sizes) if sizes.factor else cls(partial(like.new_empty, *sizes.rest), 0, ())

    @classmethod
    def of_scratch(cls, launches: Launches, rows: int | None, device: torch.device) -> Allocation:
        """For this number of rows; None: for any."""
        like = torch.empty(0, dtype=torch.uint8, device=device)
        if rows is None:
            return cls(lambda rows: like.new_empty(launches.scratch_bytes(rows)), 1, ())
        return cls(partial(like.new_empty, launches.scratch_bytes(rows)), 0, ())


class View(NamedTuple):
    """An input in another shape; ``start`` counts elements from its first. Without ``sizes`` it is as it is."""

    source: int
    sizes: Sizes | None
    strides: tuple[int, ...]
    start: int

    def of(self, tensors: Sequence[Tensor], rows: int) -> Tensor:
        tensor, sizes = tensors[self.source], self.sizes
        if sizes is None:
            return tensor.detach()
        shape = (sizes.factor * rows, *sizes.rest) if sizes.factor else sizes.rest
        return tensor.as_strided(shape, self.strides, tensor.storage_offset() + self.start)


class Replay(NamedTuple):
    """Launches, and the memory that they need.

    Attributes:
        allocations: the tensors that others will see, and large ones; then one piece of memory for all others.
        views: of inputs.
        results: the positions of the results among inputs, allocations and views; None for one that is None.
        written: the positions of inputs that are written.
    """

    launches: Launches
    allocations: tuple[Allocation, ...]
    views: tuple[View, ...]
    results: tuple[int | None, ...]
    written: tuple[int, ...]

    @classmethod
    def of(cls, first: Recording, second: Recording) -> Replay | None:
        """From one recording, given twice, for its number of rows; from two, for any. None if they do not fit."""
        if first.form() != second.form():
            return None
        rows, apart = (first.rows, second.rows), _shapes_apart(first, second)
        positions = {number: first.inputs + i for i, number in enumerate(apart)}
        sizes = [Sizes.common(*shapes, rows) for shapes in apart.values()]
        order = [positions.get(number, -1) for number in range(len(first.memory))]
        launches = first.recorder.launches(second.recorder, order)
        if launches is None or None in sizes:
            return None
        allocations = [Allocation.of(first.memory[n], each) for n, each in zip(apart, sizes, strict=True) if each]
        if -1 in order:
            fixed_rows = first.rows if first is second else None
            allocations.append(Allocation.of_scratch(launches, fixed_rows, first.memory[0].device))
        views, results = list[View](), list[int | None]()
        for a, b in zip(first.results, second.results, strict=True):
            if a is None or b is None or a.view is None:
                results.append(a and positions.get(a.source - first.inputs, a.source))
                continue
            shape = Sizes.common(a.shape, b.shape, rows)
            if shape is None:
                return None
            results.append(first.inputs + len(allocations) + len(views))
            views.append(View(a.source, None if a.is_detached else shape, *a.view))
        return cls(launches, tuple(allocations), tuple(views), tuple(results), first.written)

    def run(self, tensors: list[Any], addresses: list[int], rows: int, stream: int) -> list[Any]:
        """The results for inputs with these addresses; to both lists is added what is allocated."""
        counts.replayed += 1
        for allocate, factor, rest in self.allocations:
            tensor = allocate(factor * rows, *rest) if factor else allocate()
            tensors += (tensor,)
            addresses += (tensor.data_ptr(),)
        self.launches.run(addresses, rows, stream)
        if self.written:
            torch.autograd.graph.increment_version([tensors[i] for i in self.written])
        for view in self.views:
            tensors += (view.of(tensors, rows),)
        return [None if i is None else tensors[i] for i in self.results]


def _shapes_apart(first: Recording, second: Recording) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of the memory that a replay allocates apart, by its number: the shapes in both recordings."""
    shapes = {}
    for a, b in zip(first.results, second.results, strict=True):
        if a and b and a.source >= first.inputs:
            shapes[a.source - first.inputs] = a.shape, b.shape
    for number, (one, other) in enumerate(zip(first.memory, second.memory, strict=True)):
        if one.nbytes >= LARGE and not one.is_workspace:
            shapes.setdefault(number, (one.shape, other.shape))
    return shapes


class Captured(NamedTuple):
    """What is replayed of a backward, or of the steps of a call.

    Attributes:
        recordings: what each step did; ``replays``: built from that.
        call: what else a call needs, for whatever number of rows.
        last: what ``explain()`` needs of the call; None where that depends on the rows.
    """

    recordings: tuple[Recording, ...]
    replays: tuple[Replay, ...]
    call: Any = None
    last: Any = None

    @classmethod
    def of(cls, recordings: Sequence[Recording], call: Any = None, last: Any = None) -> Captured:
        """For the number of rows of the recordings."""
        replays = [Replay.of(recording, recording) for recording in recordings]
        return cls(tuple(recordings), tuple(filter(None, replays)), call, last)

    def joined(self, other: Captured) -> Captured | None:
        """For any number of rows, with what was captured for another one; None where they do not fit together."""
        replays = [Replay.of(*pair) for pair in zip(self.recordings, other.recordings, strict=True)]
        if self.call != other.call or None in replays:
            return None
        return self._replace(replays=tuple(filter(None, replays)), last=None)
