"""Watches a run, and says how to do again what it did: the making of replays."""

from __future__ import annotations

from collections.abc import Sequence
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.buffers import extent
from .captured import Launch, Library, Place, Record, Room

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
PLAIN = (Tensor, torch.nn.Parameter)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a run on tensors of a device: what it allocates, what it launches, and whether it does anything else."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: str | None = None
        self._given, self._rooms, self._launches = given, list[tuple[Room, int]](), list[Launch]()
        self._library: Library | None = None
        self._written: list[int] = []
        self._extents = [(*extent(t), i) if t.numel() else (0, -1, i) for i, t in enumerate(given)]
        self._check_given()

    def __enter__(self) -> Recorder:
        _watching.recorder = self
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _watching.recorder = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._allocated(result)
        elif not func.is_view and func is not torch.ops.aten.promote_types.default:
            self.refuse(f"{func} runs")
        return result

    def refuse(self, reason: str) -> None:
        """Says that what happens now would not happen in a replay."""
        self.refusal = self.refusal or reason

    def launched(self, library: Library, name: str, arguments: tuple[Any, ...]) -> None:
        """Notes a launch; every address must be in a tensor that is given or was allocated."""
        self._library, sources = library, []
        for position in library.LAUNCHES[name]:
            argument = arguments[position]
            for element, address in enumerate(argument if isinstance(argument, list) else (argument,)):
                if address:
                    sources.append((position, element, *self._find(address)))
        self._launches.append(Launch(name, arguments, tuple(sources)))

    def written(self, tensor: Tensor) -> None:
        """Notes a tensor that is given and that a launch writes, so that its version must change."""
        numbers = [i for i, given in enumerate(self._given) if given.data_ptr() == tensor.data_ptr()]
        if len(numbers) != 1:
            self.refuse("a tensor is written that is not one of those given")
        self._written += numbers

    def record(self, rows: int, made: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> Record | None:
        """What the run did; None where that cannot be done again.

        Args:
            rows: how long the tensors are that are as long as the call has rows.
            made: its results: each allocated in the run, a given tensor detached, or None.
            kept: what else it leaves: allocated in the run, given, or views of what was given.
        """
        if self.refusal is not None:
            return None
        taken = set[int]()
        places = [[None if t is None else self._place_of(t, taken) for t in group] for group in (made, kept)]
        if any(place is not None and place.kind in ("given", "view") for place in places[0]):
            self.refuse("a result was given")
        if self.refusal is not None:
            return None
        rooms, launches = tuple([room for room, _ in self._rooms]), tuple(self._launches)
        all_made: Any = tuple(places[0])
        all_kept: Any = tuple(places[1])
        written = tuple(self._written)
        return Record(rows, self._library, len(self._given), rooms, launches, all_made, all_kept, written)

    def _check_given(self) -> None:
        reached = 0
        for first, last, _ in sorted(self._extents):
            if last >= first and first < reached:
                self.refuse("given tensors overlap, so that an address does not say whose it is")
            reached = max(reached, last + 1)
        if any(type(t) not in PLAIN for t in self._given):
            self.refuse("a given tensor is of a type of its own")

    def _allocated(self, made: Tensor) -> None:
        self._rooms.append((Room(tuple(made.shape), made.dtype, made.device), made.data_ptr()))
        if not made.is_contiguous():
            self.refuse("strided memory is allocated")

    def _find(self, address: int) -> tuple[int, int]:
        """Whose an address is, rooms counted from -1 down, and how far from the start. The latest room has it."""
        for number in range(len(self._rooms) - 1, -1, -1):
            room, first = self._rooms[number]
            if first <= address < first + room.nbytes:
                return ~number, address - first
        for first, last, i in self._extents:
            if first <= address <= last:
                return i, address - self._given[i].data_ptr()
        self.refuse("a launch reads or writes memory that was neither given nor allocated")
        return 0, 0

    def _place_of(self, result: Tensor, taken: set[int]) -> Place:
        for i, given in enumerate(self._given):
            if result is given:
                return Place("given", i)
        source, distance = self._find(result.data_ptr()) if result.numel() else (0, 0)
        shape, strides = tuple(result.shape), result.stride()
        if not result.numel() or type(result) is not Tensor:
            self.refuse("a result is empty or of a type of its own")
        elif source >= 0:
            given = self._given[source]
            if result.dtype != given.dtype:
                self.refuse("a result is a given tensor in another dtype")
            same = distance == 0 and given.shape == shape and given.stride() == strides and not result._is_view()
            return Place("detached" if same else "view", source, shape, strides, distance // result.element_size())
        else:
            self._take_room(~source, distance, result, taken)
        return Place("room", ~source, shape)

    def _take_room(self, number: int, distance: int, result: Tensor, taken: set[int]) -> None:
        room, _ = self._rooms[number]
        whole = distance == 0 and result.numel() * result.element_size() == room.nbytes and result.is_contiguous()
        if not whole or number in taken or result.dtype != room.dtype:
            self.refuse("a result is a part of what was allocated, or two are one")
        taken.add(number)


class _Watching(local):
    recorder: Recorder | None = None


_watching = _Watching()


def current() -> Recorder | None:
    """Who watches this thread."""
    return _watching.recorder


def written(tensors: Tensor | Sequence[Tensor]) -> None:
    """Says, to autograd and to who watches, that a launch writes tensors."""
    torch.autograd.graph.increment_version(tensors)
    if _watching.recorder is not None:
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
            _watching.recorder.written(tensor)


def refuse(reason: str) -> None:
    """Says, to who watches, that what happens now would not happen in a replay."""
    if _watching.recorder is not None:
        _watching.recorder.refuse(reason)
