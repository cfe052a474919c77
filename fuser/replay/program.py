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
    if a.allocate is not b.allocate or not a.sizes or not rows[0] or a.sizes[0] % rows[0]:
        return None
    factor, rest = a.sizes[0] // rows[0], a.sizes[1:]
    return Created(a.allocate, rest, factor) if (factor * rows[1], *rest) == b.sizes else None


class Replay(NamedTuple):
    """Launches, and the tensors that they need.

    Attributes:
        capture: of the run, or of the first of two.
        memory: for results, then for large pieces, then one piece of scratch memory for all others.
    """

    capture: Capture
    launches: Any
    memory: list[Created]

    @classmethod
    def of(cls, first: Capture, second: Capture) -> Replay | None:
        """For any number of rows, from two captures; None if they do not fit. One is for its own number."""
        apart, rows = first.apart, (first.rows, second.rows)
        launches = first.recorder.launches(second.recorder, apart)
        if launches is None or first.form != second.form:
            return None
        memory = [_common(first.memory[n], second.memory[n], rows) for n in apart]
        if None in memory:
            return None
        if len(apart) < len(first.memory):
            allocate, size = allocator(torch.uint8, first.device), launches.scratch_bytes
            fixed = Created(allocate, (size(first.rows),))
            memory.append(fixed if first is second else Created(lambda rows: allocate(size(rows)), (), factor=1))
        return cls(first, launches, memory)  # type: ignore[arg-type]

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
        for source, shape in reversed(self.capture.views):
            tensor = tensors[source]
            tensors += (tensor.detach() if shape is None else tensor.view(shape),)
        return [None if i is None else tensors[i] for i in self.capture.results]
