"""Watches a run, and says how to do again what it did: the making of replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import local
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .buffers import extent
from .replay import Launches, Replay, View

Patch = tuple[int, int, int, int, int]
"""Of a launch: which argument, which element if it is a list, the place of a tensor, the distance from its start, and
how much farther for each row."""

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
PLAIN = (Tensor, torch.nn.Parameter)
_ALIGNMENT = 256  # of pieces of scratch memory, as torch's own allocations are
_LARGE = 2**20  # bytes of rooms that stay apart: an allocator finds those of the calls before


class Library(Protocol):
    """A compiled library whose launches can be recorded."""

    LAUNCHES: dict[str, list[int]]  # name -> which arguments are addresses or lists of them

    def Launches(self) -> Launches: ...


class _Room(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    first: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.first


class _Launch(NamedTuple):
    name: str
    arguments: tuple[Any, ...]
    sources: list[tuple[int, int, int, int]]  # patches, with the number of a given tensor or of a room (negative)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a run on tensors of a device: what it allocates, what it launches, and whether it does anything else."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: str | None = None
        self._given, self._rooms, self._launches = given, list[_Room](), list[_Launch]()
        self._library: Library | None = None
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
        self._launches.append(_Launch(name, arguments, sources))

    def replay(self, made: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> Replay | None:
        """What to do instead of the run; None where it cannot be done so.

        Args:
            made: its results: each allocated in the run, or None.
            kept: what else it leaves: allocated in the run, given, or views of what was given.
        """
        if self.refusal is not None:
            return None
        rooms, views = dict[int, Callable[[], Tensor]](), list[View]()
        places = [[None if t is None else self._place_of(t, rooms, views) for t in group] for group in (made, kept)]
        if any(place is not None and place[0] != "room" for place in places[0]):
            self.refuse("a result was given")
        if self.refusal is not None:
            return None
        for number, room in enumerate(self._rooms):
            if room.nbytes >= _LARGE and ~number not in rooms:
                rooms[~number] = _maker((room.nbytes,), torch.uint8, room.device)
        order = {number: len(self._given) + i for i, number in enumerate(rooms)}
        first_view = len(self._given) + len(rooms)
        offsets, size, device = self._scratch(order)
        launches = self._add_launches(order, offsets, first_view)
        scratch = None if device is None or not size else _maker((size,), torch.uint8, device)
        named: Any = [tuple([_settled(p, order, first_view) for p in group]) for group in places]
        return Replay(launches, tuple(rooms.values()), scratch, tuple(views), *named)

    def _check_given(self) -> None:
        reached = 0
        for first, last, _ in sorted(self._extents):
            if last >= first and first < reached:
                self.refuse("given tensors overlap, so that an address does not say whose it is")
            reached = max(reached, last + 1)
        if any(type(t) not in PLAIN for t in self._given):
            self.refuse("a given tensor is of a type of its own")

    def _allocated(self, made: Tensor) -> None:
        first = made.data_ptr()
        end = first + made.numel() * made.element_size()
        self._rooms.append(_Room(tuple(made.shape), made.dtype, made.device, first, end))
        if not made.is_contiguous():
            self.refuse("strided memory is allocated")

    def _find(self, address: int) -> tuple[int, int]:
        """Whose an address is, rooms counted from -1 down, and how far from the start. The latest room has it."""
        for number in range(len(self._rooms) - 1, -1, -1):
            room = self._rooms[number]
            if room.first <= address < room.end:
                return ~number, address - room.first
        for first, last, i in self._extents:
            if first <= address <= last:
                return i, address - self._given[i].data_ptr()
        self.refuse("a launch reads or writes memory that was neither given nor allocated")
        return 0, 0

    def _place_of(self, result: Tensor, rooms: dict[int, Callable[[], Tensor]], views: list[View]) -> tuple[str, int]:
        for i, given in enumerate(self._given):
            if result is given:
                return "given", i
        source, distance = self._find(result.data_ptr()) if result.numel() else (0, 0)
        if not result.numel() or type(result) is not Tensor:
            self.refuse("a result is empty or of a type of its own")
        elif source >= 0:
            start = distance // result.element_size()
            views.append(View(source, tuple(result.shape), result.stride(), start))
            if result.dtype != self._given[source].dtype:
                self.refuse("a result is a given tensor in another dtype")
            return "view", len(views) - 1
        else:
            self._take_room(~source, distance, result, rooms)
        return "room", source

    def _take_room(self, number: int, distance: int, result: Tensor, rooms: dict[int, Callable[[], Tensor]]) -> None:
        room = self._rooms[number]
        whole = distance == 0 and result.numel() * result.element_size() == room.nbytes and result.is_contiguous()
        if not whole or ~number in rooms:
            self.refuse("a result is a part of what was allocated, or two are one")
        rooms[~number] = _maker(tuple(result.shape), result.dtype, result.device)

    def _scratch(self, order: dict[int, int]) -> tuple[dict[int, int], int, torch.device | None]:
        """Where each of the other rooms begins in one piece of memory, and the size of that."""
        offsets, size = dict[int, int](), 0
        for number, room in enumerate(self._rooms):
            if ~number not in order:
                offsets[~number] = size
                size += -(-room.nbytes // _ALIGNMENT) * _ALIGNMENT
        return offsets, size, self._rooms[0].device if self._rooms else None

    def _add_launches(self, order: dict[int, int], offsets: dict[int, int], scratch: int) -> Launches | None:
        if self._library is None:
            return None
        launches = self._library.Launches()
        for name, arguments, sources in self._launches:
            patches: list[Patch] = []
            for position, element, source, distance in sources:
                place = source if source >= 0 else order.get(source, scratch)
                patches.append((position, element, place, distance + offsets.get(source, 0), 0))
            getattr(launches, name)(patches, *arguments)
        return launches


def _maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Allocates such tensors: like one of that shape, without memory, which is the fastest way to say it."""
    one = torch.empty((), dtype=dtype, device=device)
    like = one.view(shape) if all(n == 1 for n in shape) else one.expand(shape)
    one.untyped_storage().resize_(0)
    return partial(torch.empty_like, like)


def _settled(place: tuple[str, int] | None, order: dict[int, int], first_view: int) -> int | None:
    if place is None:
        return None
    kind, number = place
    return number if kind == "given" else order[number] if kind == "room" else first_view + number


class _Watching(local):
    recorder: Recorder | None = None


_watching = _Watching()


def current() -> Recorder | None:
    """Who watches this thread."""
    return _watching.recorder


def refuse(reason: str) -> None:
    """Says, to who watches, that what happens now would not happen in a replay."""
    if _watching.recorder is not None:
        _watching.recorder.refuse(reason)
