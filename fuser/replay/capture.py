"""Captures what a run does on a device: its allocations and its kernel launches."""

from __future__ import annotations

from collections.abc import Sequence
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.buffers import extent
from .captured import Allocation, Captured, Launch, Library, Origin, ValueRef

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
PLAIN = (Tensor, torch.nn.Parameter)


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a run: what it allocates and launches. Any other operation but a view makes it impossible to replay."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: str | None = None
        self._given, self._allocations, self._launches = given, list[tuple[Allocation, int]](), list[Launch]()
        self._library: Library | None = None
        self._written: list[int] = []
        self._extents = [(*extent(t), i) if t.numel() else (0, -1, i) for i, t in enumerate(given)]
        self._check_given()

    def __enter__(self) -> Capture:
        _active.capture = self
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _active.capture = None
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

    def result(self, rows: int, made: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> Captured | None:
        """What the run did; None where that cannot be replayed.

        Args:
            rows: how long the tensors are that are as long as the call has rows.
            made: its results: each allocated in the run, a given tensor detached, or None.
            kept: what else it leaves: allocated in the run, given, or views of what was given.
        """
        if self.refusal is not None:
            return None
        taken = set[int]()
        refs = [[None if t is None else self._ref_of(t, taken) for t in group] for group in (made, kept)]
        if any(ref is not None and ref.origin in (Origin.GIVEN, Origin.VIEW) for ref in refs[0]):
            self.refuse("a result was given")
        if self.refusal is not None:
            return None
        allocations, launches = tuple([allocation for allocation, _ in self._allocations]), tuple(self._launches)
        all_made: Any = tuple(refs[0])
        all_kept: Any = tuple(refs[1])
        written = tuple(self._written)
        return Captured(rows, self._library, len(self._given), allocations, launches, all_made, all_kept, written)

    def _check_given(self) -> None:
        reached = 0
        for first, last, _ in sorted(self._extents):
            if last >= first and first < reached:
                self.refuse("given tensors overlap, so that an address does not say whose it is")
            reached = max(reached, last + 1)
        if any(type(t) not in PLAIN for t in self._given):
            self.refuse("a given tensor is of a type of its own")

    def _allocated(self, made: Tensor) -> None:
        self._allocations.append((Allocation(tuple(made.shape), made.dtype, made.device), made.data_ptr()))
        if not made.is_contiguous():
            self.refuse("strided memory is allocated")

    def _find(self, address: int) -> tuple[int, int]:
        """The tensor or (from -1 down) the latest allocation that an address is in, and the distance from its start."""
        for number in range(len(self._allocations) - 1, -1, -1):
            allocation, first = self._allocations[number]
            if first <= address < first + allocation.nbytes:
                return ~number, address - first
        for first, last, i in self._extents:
            if first <= address <= last:
                return i, address - self._given[i].data_ptr()
        self.refuse("a launch reads or writes memory that was neither given nor allocated")
        return 0, 0

    def _ref_of(self, result: Tensor, taken: set[int]) -> ValueRef:
        for i, given in enumerate(self._given):
            if result is given:
                return ValueRef(Origin.GIVEN, i)
        source, distance = self._find(result.data_ptr()) if result.numel() else (0, 0)
        shape, strides = tuple(result.shape), result.stride()
        if not result.numel() or type(result) is not Tensor:
            self.refuse("a result is empty or of a type of its own")
        elif source >= 0:
            given = self._given[source]
            if result.dtype != given.dtype:
                self.refuse("a result is a given tensor in another dtype")
            same = distance == 0 and given.shape == shape and given.stride() == strides and not result._is_view()
            return ValueRef(
                Origin.DETACHED if same else Origin.VIEW, source, shape, strides, distance // result.element_size()
            )
        else:
            self._take_allocation(~source, distance, result, taken)
        return ValueRef(Origin.ALLOCATION, ~source, shape)

    def _take_allocation(self, number: int, distance: int, result: Tensor, taken: set[int]) -> None:
        allocation, _ = self._allocations[number]
        whole = distance == 0 and result.numel() * result.element_size() == allocation.nbytes and result.is_contiguous()
        if not whole or number in taken or result.dtype != allocation.dtype:
            self.refuse("a result is a part of what was allocated, or two are one")
        taken.add(number)


class _Active(local):
    capture: Capture | None = None


_active = _Active()


def current() -> Capture | None:
    """The capture that observes this thread."""
    return _active.capture


def written(tensors: Tensor | Sequence[Tensor]) -> None:
    """Tells autograd, and the capture if there is one, that a launch writes tensors."""
    torch.autograd.graph.increment_version(tensors)
    if _active.capture is not None:
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
            _active.capture.written(tensor)


def refuse(reason: str) -> None:
    """Tells the capture, if there is one, that what happens now would not happen in a replay."""
    if _active.capture is not None:
        _active.capture.refuse(reason)
