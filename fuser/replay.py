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


class Launches(Protocol):
    """Launches that a library can make again: its own object, with a method of the name of each launch to add one."""

    def run(self, addresses: list[int], /) -> None: ...


class View(NamedTuple):
    """A given tensor in another shape; ``start`` counts elements from its first."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[self.place]
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.start)


class Replay(NamedTuple):
    """Launches, and the room that they need.

    Attributes:
        rooms: make the tensors that somebody else will see, and large ones, in the places behind those that are given.
        scratch: makes one piece of memory for all others; None where there are none.
        views: tensors behind these, of given ones.
        made: the places of the results; None for one that is None.
        kept: the places of what else the run leaves.
    """

    launches: Launches | None
    rooms: tuple[Callable[[], Tensor], ...]
    scratch: Callable[[], Tensor] | None
    views: tuple[View, ...]
    made: tuple[int | None, ...]
    kept: tuple[int, ...]

    def run(self, given: list[Tensor], addresses: list[int]) -> list[Tensor]:
        """The given tensors and those that were made, in their places; ``addresses`` are those of the given ones."""
        for room in self.rooms:
            made = room()
            given.append(made)
            addresses.append(made.data_ptr())
        if self.scratch is not None:
            scratch = self.scratch()
            addresses.append(scratch.data_ptr())
        if self.launches is not None:
            self.launches.run(addresses)
        for view in self.views:
            given.append(view.of(given))
        return given


class Entry:
    """What is known of a form of tensors: types, dtypes, devices, shapes, strides, gradients, and modes of dispatch."""

    __slots__ = ("matches", "what")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.matches = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.what: Any = None


class Forms:
    """Entries, by a key for what is no tensor. Where they are many, those of an earlier time go."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], list[Entry]] = {}
        self._count = 0

    def entry(self, key: tuple[Any, ...], tensors: Sequence[Tensor]) -> Entry:
        """The one for these; a new one, of which nothing is known, if there was none."""
        entries = self._entries.get(key)
        if entries is not None:
            for entry in entries:
                if entry.matches(*tensors):
                    return entry
        if self._count >= _MANY:
            self.clear()
        entry = Entry(tensors)
        self._entries.setdefault(key, []).append(entry)
        self._count += 1
        return entry

    def clear(self) -> None:
        """Forgets them all."""
        self._entries.clear()
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
