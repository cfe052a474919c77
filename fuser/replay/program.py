"""Replays, built from captures: of one run for its number of rows, of two for any.

The library declares which numbers of a launch count rows, and how large a workspace is for how many. Of allocations the
first size may vary. A second run with another number of rows tells whether a number only happens to be theirs. If the
runs differ in anything else, each is replayed for its own number of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .capture import Capture, Memory, View
from .stats import counts


class Sizes(NamedTuple):
    """The sizes of a tensor. If ``factor`` is not 0, they follow a first one, which is so many times the rows."""

    factor: int
    rest: tuple[int, ...]


class Allocation(NamedTuple):
    """Makes a tensor: ``allocate()``, or ``allocate(factor * rows, *rest)`` if ``factor`` is not 0."""

    allocate: Callable[..., Tensor]
    factor: int = 0
    rest: tuple[int, ...] = ()


def _common(a: tuple[int, ...], b: tuple[int, ...], rows: tuple[int, int]) -> Sizes | None:
    """For any number of rows, from the sizes in two captures; None if they do not tell."""
    if a == b:
        return Sizes(0, a)
    if not rows[0] or a[1:] != b[1:] or a[0] % rows[0] or a[0] // rows[0] * rows[1] != b[0]:
        return None
    return Sizes(a[0] // rows[0], a[1:])


class Replay(NamedTuple):
    """Launches, and the memory that they need.

    Attributes:
        capture: of the run, or of the first of two.
        allocations: the tensors that others will see, and large ones; then one piece of memory for all others.
        results: the positions of the results among inputs, allocations and views; None for one that is None.
    """

    capture: Capture
    launches: Any
    allocations: tuple[Allocation, ...]
    views: tuple[tuple[View, Sizes], ...]
    results: tuple[int | None, ...]

    @classmethod
    def of(cls, first: Capture, second: Capture | None = None) -> Replay | None:
        """For any number of rows, from two captures; None if they do not fit. One is for its own number."""
        second = second or first
        apart = [n for n, memory in enumerate(first.memory) if memory.is_apart]
        launches = first.recorder.launches(second.recorder, apart)
        if launches is None or first.form() != second.form():
            return None
        pairs = [(first.memory[n].shape, second.memory[n].shape) for n in apart]
        pairs += [(a.shape, b.shape) for a, b in zip(first.views, second.views, strict=True)]
        sizes = [each for each in (_common(*pair, (first.rows, second.rows)) for pair in pairs) if each is not None]
        if len(sizes) < len(pairs):
            return None
        allocations = [_allocation(first.memory[n], each) for n, each in zip(apart, sizes)]  # noqa: B905
        if len(apart) < len(first.memory):
            allocations.append(_scratch(launches, first.rows if first is second else None, first.memory[0].device))
        positions = {first.inputs + n: first.inputs + i for i, n in enumerate(apart)}
        positions |= {~i: i - len(first.views) for i in range(len(first.views))}
        results = tuple([None if n is None else positions.get(n, n) for n in first.results])
        views = tuple(zip(first.views, sizes[len(apart) :], strict=True))
        return cls(first, launches, tuple(allocations), views, results)

    def joined(self, other: Replay) -> Replay | None:
        """For any number of rows, with a replay for another one; None if they do not fit."""
        return Replay.of(self.capture, other.capture)

    def run(self, tensors: list[Any], addresses: list[int], rows: int, stream: int) -> list[Any]:
        """The results for inputs with these addresses; to both lists is added what is allocated."""
        counts.replayed += 1
        for allocate, factor, rest in self.allocations:
            tensor = allocate(factor * rows, *rest) if factor else allocate()
            tensors += (tensor,)
            addresses += (tensor.data_ptr(),)
        self.launches.run(addresses, rows, stream)
        if self.capture.written:
            torch.autograd.graph.increment_version([tensors[i] for i in self.capture.written])
        for view, sizes in self.views:
            tensors += (_viewed(tensors[view.source], view, sizes, rows),)
        return [None if i is None else tensors[i] for i in self.results]


def _allocation(memory: Memory, sizes: Sizes) -> Allocation:
    allocate = torch.empty(0, dtype=memory.dtype, device=memory.device).new_empty  # the fastest way to say these
    return Allocation(allocate, *sizes) if sizes.factor else Allocation(partial(allocate, *sizes.rest))


def _scratch(launches: Any, rows: int | None, device: torch.device) -> Allocation:
    """For this number of rows; None: for any."""
    allocate = torch.empty(0, dtype=torch.uint8, device=device).new_empty
    if rows is None:
        return Allocation(lambda rows: allocate(launches.scratch_bytes(rows)), 1)
    return Allocation(partial(allocate, launches.scratch_bytes(rows)))


def _viewed(tensor: Tensor, view: View, sizes: Sizes, rows: int) -> Tensor:
    if view.strides is None:
        return tensor.detach()
    shape = (sizes.factor * rows, *sizes.rest) if sizes.factor else sizes.rest
    return tensor.as_strided(shape, view.strides, tensor.storage_offset() + view.start)
