"""Replays, built from captures: of one run for its number of rows, of two for any.

The library declares which numbers of a launch count rows, and how large a workspace is for how many. Of a tensor the
first size may vary. A second run with another number of rows tells whether a number only happens to be theirs. If the
runs differ in anything else, each is replayed for its own number of rows alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .capture import Capture, Created, allocator
from .stats import counts


def _common(a: Created, b: Created, rows: tuple[int, int]) -> Created | None:
    """For any number of rows, from what two runs create; None if they do not tell."""
    if a == b:
        return a
    if a.origin != b.origin or not a.sizes or not rows[0] or a.sizes[0] % rows[0]:
        return None
    factor, rest = a.sizes[0] // rows[0], a.sizes[1:]
    return Created(a.origin, rest, factor) if (factor * rows[1], *rest) == b.sizes else None


def _scratch(launches: Any, device: torch.device, rows: int | None) -> Created:
    """For this number of rows; None: for any."""
    allocate = allocator(torch.uint8, device)
    if rows is None:
        return Created(lambda rows: allocate(launches.scratch_bytes(rows)), (), 1)
    return Created(allocate, (launches.scratch_bytes(rows),))


class Replay(NamedTuple):
    """Launches, and the tensors that they need.

    Attributes:
        capture: of the run, or of the first of two.
        memory: for results, then for large pieces, then one piece of scratch memory for all others.
    """

    capture: Capture
    launches: Any
    memory: tuple[Created, ...]
    views: tuple[Created, ...]

    @classmethod
    def of(cls, first: Capture, second: Capture) -> Replay | None:
        """For any number of rows, from two captures; None if they do not fit. One is for its own number."""
        apart = [*first.returned, *[n for n in first.large if n not in first.returned]]
        launches = first.recorder.launches(second.recorder, apart)
        forms = [(each.results, each.returned, each.written) for each in (first, second)]
        if launches is None or forms[0] != forms[1]:
            return None
        rows = first.rows, second.rows
        pairs = [(first.memory[n], second.memory[n]) for n in apart]
        pairs += zip(first.views, second.views, strict=True)
        created = tuple([each for a, b in pairs if (each := _common(a, b, rows)) is not None])
        if len(created) < len(pairs):
            return None
        memory, views = created[: len(apart)], created[len(apart) :]
        if len(memory) < len(first.memory):
            memory += (_scratch(launches, first.device, first.rows if first is second else None),)
        return cls(first, launches, memory, views[::-1])

    def joined(self, other: Replay) -> Replay | None:
        """For any number of rows, with a replay for another one; None if they do not fit."""
        return Replay.of(self.capture, other.capture)

    def run(self, tensors: list[Any], addresses: list[int], rows: int, stream: int) -> list[Any]:
        """The results for inputs with these addresses; to both lists is added what is allocated."""
        counts.replayed += 1
        for allocate, sizes, factor in self.memory:
            tensor = allocate(factor * rows, *sizes) if factor else allocate(*sizes)
            tensors += (tensor,)
            addresses += (tensor.data_ptr(),)
        self.launches.run(addresses, rows, stream)
        if self.capture.written:
            torch.autograd.graph.increment_version([tensors[i] for i in self.capture.written])
        for (source, strides, start), sizes, factor in self.views:
            tensor, shape = tensors[source], (factor * rows, *sizes) if factor else sizes
            layout = shape, strides, tensor.storage_offset() + start
            tensors += (tensor.detach() if strides is None else tensor.as_strided(*layout),)
        return [None if i is None else tensors[i] for i in self.capture.results]
