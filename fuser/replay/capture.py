"""Captures what a run does on a device: its allocations, and the kernel launches that the library notes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.buffers import extent
from .captured import Allocation, Captured, Library, Origin, ValueRef

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
PLAIN = (Tensor, torch.nn.Parameter)


class _Libraries:
    """Finds the library whose launches can be captured."""

    find: Callable[[], Library | None] = staticmethod(lambda: None)


def register_library(find: Callable[[], Library | None]) -> None:
    """Names the library whose launches can be captured; ``find`` returns None where it is not built."""
    _Libraries.find = staticmethod(find)


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a run. Any operation but an allocation, a view or a launch of the library makes it impossible to replay.

    Args:
        given: the tensors that the run reads and writes.
        rows: the number of rows of the call.
    """

    def __init__(self, given: Sequence[Tensor], rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refusal: str | None = None
        self._given, self._rows, self._written = given, rows, list[int]()
        self._allocations = list[tuple[Allocation, int]]()
        self._spans = [_span(tensor) for tensor in given]
        self._check_given()
        library = _Libraries.find()
        self._recorder = None if library is None else library.Capture(self._spans, rows)
        if library is None:
            self.refuse("no library is built whose launches can be captured")

    def __enter__(self) -> Capture:
        _active.capture = self
        if self._recorder is not None:
            self._recorder.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _active.capture = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._recorder is not None:
            self._recorder.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._allocated(result)
        elif not func.is_view and func is not torch.ops.aten.promote_types.default:
            self.refuse(f"{func} runs")
        return result

    @property
    def refusal(self) -> str | None:
        """Why the run cannot be replayed, as far as is known."""
        return self._refusal or (None if self._recorder is None else self._recorder.refusal)

    def refuse(self, reason: str) -> None:
        """Says that what happens now would not happen in a replay."""
        self._refusal = self._refusal or reason

    def written(self, tensor: Tensor) -> None:
        """Notes a tensor that is given and that a launch writes, so that its version must change."""
        numbers = [i for i, given in enumerate(self._given) if given.data_ptr() == tensor.data_ptr()]
        if len(numbers) != 1:
            self.refuse("a tensor is written that is not one of those given")
        self._written += numbers

    def result(self, made: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> Captured | None:
        """What the run did; None where that cannot be replayed.

        Args:
            made: its results: each allocated in the run, a given tensor detached, or None.
            kept: what else it leaves: allocated in the run, given, or views of what was given.
        """
        taken = set[int]()
        refs = [[None if t is None else self._ref_of(t, taken) for t in group] for group in (made, kept)]
        if any(ref is not None and ref.origin in (Origin.GIVEN, Origin.VIEW) for ref in refs[0]):
            self.refuse("a result was given")
        if self._recorder is None or self.refusal is not None:
            return None
        allocations, written = tuple([allocation for allocation, _ in self._allocations]), tuple(self._written)
        all_made, all_kept = map(tuple, refs)
        return Captured(self._rows, self._recorder, len(self._given), allocations, all_made, all_kept, written)

    def _check_given(self) -> None:
        reached = 0
        for first, size in sorted(self._spans):
            if size and first < reached:
                self.refuse("given tensors overlap, so that an address does not say whose it is")
            reached = max(reached, first + size)
        if any(type(t) not in PLAIN for t in self._given):
            self.refuse("a given tensor is of a type of its own")

    def _allocated(self, made: Tensor) -> None:
        is_bytes, workspace = made.dtype is torch.uint8, False  # bytes are workspaces, whose sizes may be rounded
        if self._recorder is not None:
            workspace = self._recorder.allocated(made.data_ptr(), made.nbytes, not is_bytes)
        allocation = Allocation(tuple(made.shape), made.dtype, made.device, is_bytes or workspace)
        self._allocations.append((allocation, made.data_ptr()))
        if not made.is_contiguous():
            self.refuse("strided memory is allocated")

    def _find(self, address: int) -> tuple[int, int]:
        """The tensor or (from -1 down) the latest allocation that an address is in, and the distance from its start."""
        spans = [(first, allocation.nbytes) for allocation, first in reversed(self._allocations)] + self._spans
        for i, (first, size) in enumerate(spans):
            if first <= address < first + size:
                return i - len(self._allocations), address - first
        self.refuse("a result is neither given nor allocated")
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
            origin = Origin.DETACHED if same else Origin.VIEW
            return ValueRef(origin, source, shape, strides, distance // result.element_size())
        else:
            self._take_allocation(~source, distance, result, taken)
        return ValueRef(Origin.ALLOCATION, ~source, shape)

    def _take_allocation(self, number: int, distance: int, result: Tensor, taken: set[int]) -> None:
        allocation, _ = self._allocations[number]
        whole = distance == 0 and result.numel() * result.element_size() == allocation.nbytes and result.is_contiguous()
        if not whole or number in taken or result.dtype != allocation.dtype:
            self.refuse("a result is a part of what was allocated, or two are one")
        taken.add(number)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first address, and how many bytes the tensor reaches."""
    if not tensor.numel():
        return 0, 0
    first, last = extent(tensor)
    return first, last + 1 - first


class _Active(local):
    capture: Capture | None = None


_active = _Active()


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
