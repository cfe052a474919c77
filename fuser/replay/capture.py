"""Captures what a run does on a device: its allocations, and the kernel launches that the library notes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from threading import local
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.buffers import extent

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
TENSOR_TYPES = (Tensor, torch.nn.Parameter)


class Launches(Protocol):
    """Captured launches, of the library that made them."""

    def scratch_bytes(self, rows: int, /) -> int:
        """What a run needs behind the addresses of tensors."""

    def run(self, addresses: list[int], rows: int, stream: int, /) -> None:
        """Makes all launches, in order."""


class LaunchRecorder(AbstractContextManager[Any], Protocol):
    """The library's own capture: of a run on tensors with given first addresses and sizes in bytes.

    It notes the launches of its thread while it is entered.

    Attributes:
        refusal: why they cannot be made again, or None.
    """

    refusal: str | None

    def allocated(self, address: int, nbytes: int, per_row: bool, /) -> bool:
        """Tells of memory; returns whether it is a workspace whose size the library was asked for just before."""

    def launches(self, other: Any, positions: list[int], /) -> Launches | None:
        """What is captured here, for its number of rows; with another capture, for any. None if they do not fit.

        ``positions`` says of each allocation which address a run is given for it; -1: it is a piece of scratch memory.
        """


class Memory(NamedTuple):
    """Memory that a run allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_workspace: bool
    nbytes: int


class Result(NamedTuple):
    """What a result of a run is.

    Attributes:
        source: which tensor it is; allocations are numbered behind the inputs.
        view: of an input, which view: strides, and how many elements it starts behind; None if it is the tensor itself.
        is_detached: whether that view is the input as it is, without its gradient.
    """

    source: int
    shape: tuple[int, ...]
    view: tuple[tuple[int, ...], int] | None = None
    is_detached: bool = False


class Recording(NamedTuple):
    """What a run did. Holds no tensors."""

    rows: int
    recorder: LaunchRecorder
    inputs: int
    memory: tuple[Memory, ...]
    results: tuple[Result | None, ...]
    written: tuple[int, ...]

    def form(self) -> tuple[Any, ...]:
        """What does not depend on the number of rows, besides launches."""
        results = [result and result._replace(shape=()) for result in self.results]
        return self.inputs, results, self.written, [a._replace(shape=(), nbytes=0) for a in self.memory]


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a run. Any operation but an allocation, a view or a launch of the library makes it impossible to replay.

    Args:
        inputs: the tensors that the run reads and writes.
        rows: the number of rows of the call.

    Attributes:
        find_library: finds the compiled library whose launches can be captured, or returns None.
    """

    find_library: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, inputs: Sequence[Tensor], rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refusal: str | None = None
        self._inputs, self._rows, self._written = inputs, rows, list[int]()
        self._memory, self._number_at = list[Memory](), dict[int, int]()
        ends = [extent(t) if t.numel() else (0, -1) for t in inputs]
        self._spans = [(first, last + 1 - first) for first, last in ends]
        library = self.find_library()
        self._recorder = None if library is None else library.Capture(self._spans, rows)
        if library is None:
            self.refuse("no library is built whose launches can be captured")
        spans = sorted([span for span in self._spans if span[1]])
        if any(first + size > following for (first, size), (following, _) in pairwise(spans)):
            self.refuse("inputs overlap, so that an address does not say whose it is")
        if any(type(t) not in TENSOR_TYPES for t in inputs):
            self.refuse("a tensor is of a type of its own")

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
        """Notes an input that a launch writes, so that its version must change."""
        numbers = [i for i, each in enumerate(self._inputs) if each.data_ptr() == tensor.data_ptr()]
        if len(numbers) != 1:
            self.refuse("a tensor is written that is not one of the inputs")
        self._written += numbers

    def recording(self, outputs: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> Recording | None:
        """What the run did; None where that cannot be replayed.

        Args:
            outputs: each allocated in the run, an input detached, or None.
            kept: what else it leaves: allocated in the run, an input, or a view of one.
        """
        results = [None if tensor is None else self._result(tensor) for tensor in (*outputs, *kept)]
        allocated = [each.source for each in results if each is not None and each.source >= len(self._inputs)]
        if len(set(allocated)) < len(allocated):
            self.refuse("two results are one allocation")
        if any(r and r.source < len(self._inputs) and not r.is_detached for r in results[: len(outputs)]):
            self.refuse("a result is an input")
        if self._recorder is None or self.refusal is not None:
            return None
        memory, written = tuple(self._memory), tuple(self._written)
        return Recording(self._rows, self._recorder, len(self._inputs), memory, tuple(results), written)

    def _allocated(self, tensor: Tensor) -> None:
        is_bytes, workspace = tensor.dtype is torch.uint8, False  # bytes are workspaces, whose sizes may be rounded
        if self._recorder is not None:
            workspace = self._recorder.allocated(tensor.data_ptr(), tensor.nbytes, not is_bytes)
        self._number_at[tensor.data_ptr()] = len(self._memory)  # the latest, if memory was freed meanwhile
        form = tuple(tensor.shape), tensor.dtype, tensor.device
        self._memory.append(Memory(*form, is_bytes or workspace, tensor.nbytes))
        if not tensor.is_contiguous():
            self.refuse("strided memory is allocated")

    def _result(self, result: Tensor) -> Result:
        shape, strides, address = tuple(result.shape), result.stride(), result.data_ptr()
        for i, (tensor, (first, size)) in enumerate(zip(self._inputs, self._spans, strict=True)):
            if result is tensor:
                return Result(i, shape)
            if first <= address < first + size:
                if result.dtype != tensor.dtype:
                    self.refuse("a result is an input in another dtype")
                start = (address - first) // result.element_size()
                same = not start and tensor.shape == shape and tensor.stride() == strides and not result._is_view()
                return Result(i, shape, (strides, start), same)
        number = self._number_at.get(address)
        if number is None or not result.numel() or type(result) is not Tensor:
            self.refuse("a result is empty, of a type of its own, or neither an input nor all of an allocation")
            return Result(0, shape)
        memory = self._memory[number]
        if result.nbytes != memory.nbytes or result.dtype != memory.dtype or not result.is_contiguous():
            self.refuse("a result is a part of an allocation")
        return Result(len(self._inputs) + number, shape)


class _Active(local):
    capture: Capture | None = None


_active = _Active()


def register_library(find: Callable[[], Any]) -> None:
    """Names the library whose launches can be captured; ``find`` returns None where it is not built."""
    Capture.find_library = staticmethod(find)


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
