"""A captured forward or backward: its kernel launches, made again with new addresses in one call of the extension.

The first call of a form runs by the code of its ops, the second is captured, and from the third on only memory is
allocated and the launches are made again. The code is the same for all of them, that of the op; a replay is what is
left of it once every decision that depends on forms has been taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Launches(Protocol):
    """Launches that a library can make again: its own object, with a method of the name of each launch to add one."""

    def run(self, addresses: list[int], rows: int, stream: int, /) -> None: ...


class Affine(NamedTuple):
    """A number that grows with the rows of a call."""

    offset: int
    factor: int

    def at(self, rows: int) -> int:
        return self.offset + self.factor * rows


class View(NamedTuple):
    """A given tensor in another shape, or detached as it is; ``start`` counts elements from its first."""

    source: int
    shape: tuple[Affine, ...]
    strides: tuple[int, ...]
    start: int
    detached: bool

    def of(self, tensors: Sequence[Tensor], rows: int) -> Tensor:
        tensor = tensors[self.source]
        if self.detached:
            return tensor.detach()
        shape = [offset + factor * rows for offset, factor in self.shape]
        return tensor.as_strided(shape, self.strides, tensor.storage_offset() + self.start)


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

    launches: Launches | None
    allocations: tuple[Callable[..., Tensor], ...]
    scratch: Callable[..., Tensor] | None
    views: tuple[View, ...]
    made: tuple[int | None, ...]
    kept: tuple[int, ...]
    written: tuple[int, ...]
    any_rows: bool

    def run(self, given: list[Tensor], addresses: list[int], rows: int, stream: int) -> list[Tensor]:
        """The given tensors and those that were made, in their positions; ``addresses`` are those of the given ones."""
        sizes = (rows,) if self.any_rows else ()
        for allocate in self.allocations:
            made = allocate(*sizes)
            given += (made,)
            addresses += (made.data_ptr(),)
        if self.scratch is not None:
            scratch = self.scratch(*sizes)
            addresses += (scratch.data_ptr(),)
        if self.launches is not None:
            self.launches.run(addresses, rows, stream)
        if self.written:
            torch.autograd.graph.increment_version([given[i] for i in self.written])
        for view in self.views:
            given.append(view.of(given, rows))
        return given


def is_replayed_for(tensor: Tensor) -> bool:
    """Whether work for such tensors is launched, rather than done."""
    return tensor.device.type == "cuda"


def stream_of(tensor: Tensor) -> int:
    """The address of the current stream of a tensor's device, without an object for it; 0 where there are none."""
    return int(torch._C._cuda_getCurrentRawStream(tensor.get_device())) if tensor.device.type == "cuda" else 0


def aligned(addresses: list[int]) -> bool:
    """Whether every kernel can read there: some choose their way by the last bits of an address."""
    return not reduce(or_, addresses) & 15
