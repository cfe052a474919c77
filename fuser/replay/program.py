"""A captured forward or backward: its kernel launches, made again with new addresses in one call of the extension.

The first call of a form runs by the code of its ops, the second is captured, and from the third on only memory is
allocated and the launches are made again. The code is the same for all of them, that of the op; a replay is what is
left of it once every decision that depends on forms has been taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .stats import counts


class Launches(Protocol):
    """Captured launches, of the library that made them."""

    def scratch_bytes(self, rows: int, /) -> int:
        """What a run needs behind the addresses of tensors."""

    def run(self, addresses: list[int], rows: int, stream: int, /) -> None:
        """Makes all launches, in order."""


class Shape(NamedTuple):
    """The sizes of a tensor; the first is ``factor`` times the number of rows unless that is 0."""

    sizes: tuple[int, ...]
    factor: int

    def at(self, rows: int) -> tuple[int, ...]:
        return (self.factor * rows, *self.sizes[1:]) if self.factor else self.sizes


class View(NamedTuple):
    """A given tensor in another shape, or detached as it is; ``start`` counts elements from its first."""

    source: int
    shape: Shape
    strides: tuple[int, ...]
    start: int
    detached: bool

    def of(self, tensors: Sequence[Tensor], rows: int) -> Tensor:
        tensor = tensors[self.source]
        if self.detached:
            return tensor.detach()
        return tensor.as_strided(self.shape.at(rows), self.strides, tensor.storage_offset() + self.start)


class Replay(NamedTuple):
    """Launches, and the memory that they need.

    Attributes:
        allocations: make the tensors that others will see, and large ones, at the positions behind the given ones.
        scratch: makes one piece of memory for all others; None where there are none.
        views: tensors behind these, of given ones.
        made: the positions of the results; None for one that is None.
        kept: the positions of what else the run leaves.
        written: the positions of given tensors that are written.
        any_rows: whether it can be run for any number of rows, which then says how much memory is allocated.
    """

    launches: Launches
    allocations: tuple[Callable[..., Tensor], ...]
    scratch: Callable[..., Tensor] | None
    views: tuple[View, ...]
    made: tuple[int | None, ...]
    kept: tuple[int, ...]
    written: tuple[int, ...]
    any_rows: bool

    def run(self, given: list[Tensor], addresses: list[int], rows: int, stream: int) -> list[Tensor]:
        """The given tensors and those that were made, in their positions; ``addresses`` are those of the given ones."""
        counts.replayed += 1
        sizes = (rows,) if self.any_rows else ()
        for allocate in self.allocations:
            made = allocate(*sizes)
            given += (made,)
            addresses += (made.data_ptr(),)
        if self.scratch is not None:
            scratch = self.scratch(*sizes)
            addresses += (scratch.data_ptr(),)
        self.launches.run(addresses, rows, stream)
        if self.written:
            torch.autograd.graph.increment_version([given[i] for i in self.written])
        for view in self.views:
            given.append(view.of(given, rows))
        return given
