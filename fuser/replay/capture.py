"""Captures what a run does on a device: its allocations, and the kernel launches that the library notes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from threading import local
from typing import Any, NamedTuple

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
LARGE = 2**20  # bytes of allocations that stay apart: an allocator finds those of the calls before


class Memory(NamedTuple):
    """Memory that a run allocates; ``is_apart``: a replay makes a tensor of it, not a piece of scratch memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_apart: bool


class View(NamedTuple):
    """An input in another shape; ``start`` counts elements from its first. Without strides it is only detached."""

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    start: int


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a run. Any operation but an allocation, a view or a launch of the library makes it impossible to replay.

    Attributes:
        inputs: how many tensors the run reads and writes; ``rows``: what it counts as rows.
        recorder: the library's own capture, of the launches.
        results: each a number: inputs first, then allocations, and ``~i`` for view ``i`` of an input.
        written: the inputs that are written.
        find_library: finds the compiled library whose launches can be captured, or returns None.
    """

    find_library: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, inputs: Sequence[Tensor], rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs, self.rows, self._tensors, self._refusal = len(inputs), rows, inputs, ""
        self.memory, self.views = list[Memory](), list[View]()
        self.results, self.written = list[int | None](), list[int]()
        ends = [extent(t) if t.numel() else (0, -1) for t in inputs]
        self.recorder = self.find_library().Capture([(first, last + 1 - first) for first, last in ends], rows)
        if any(type(t) not in TENSOR_TYPES for t in inputs):
            self.refuse("a tensor is of a type of its own")

    def __enter__(self) -> Capture:
        _active.capture = self
        self.recorder.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _active.capture = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.recorder.__exit__(*error)

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
        return self._refusal or self.recorder.refusal

    def refuse(self, reason: str) -> None:
        """Says that what happens now would not happen in a replay."""
        self._refusal = self._refusal or reason

    def note_written(self, tensor: Tensor) -> None:
        """Notes an input that a launch writes, so that its version must change."""
        number, offset = self.recorder.find(tensor.data_ptr())
        if offset or not 0 <= number < self.inputs:
            self.refuse("a tensor is written that is not one of the inputs")
        self.written.append(number)

    def finish(self, outputs: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> str | None:
        """Notes the results, and lets go of the inputs; returns why the run cannot be replayed.

        Args:
            outputs: each allocated in the run, an input detached, or None; one tensor may be several of them.
            kept: what else it leaves: allocated in the run, an input, or a view of one.
        """
        results = [None if tensor is None else self._number(tensor) for tensor in outputs]
        if any(n is not None and n < self.inputs and (n >= 0 or self.views[~n].strides is not None) for n in results):
            self.refuse("a result is an input")
        self.results = results + [self._number(tensor) for tensor in kept]
        different = [*dict(zip(map(id, outputs), results, strict=True)).values(), *self.results[len(results) :]]
        allocated = [n for n in different if n is not None and n >= self.inputs]
        if len(set(allocated)) < len(allocated):
            self.refuse("two results are one allocation")
        self._tensors = ()
        return self.refusal

    def form(self) -> tuple[Any, ...]:
        """What does not depend on the number of rows, besides launches."""
        memory = [each._replace(shape=(), is_apart=False) for each in self.memory]
        return self.inputs, memory, [view._replace(shape=()) for view in self.views], self.results, self.written

    def _allocated(self, tensor: Tensor) -> None:
        is_bytes = tensor.dtype is torch.uint8  # bytes are workspaces, whose sizes may be rounded
        is_workspace = self.recorder.allocated(tensor.data_ptr(), tensor.nbytes, not is_bytes) or is_bytes
        is_apart = tensor.nbytes >= LARGE and not is_workspace
        self.memory.append(Memory(tuple(tensor.shape), tensor.dtype, tensor.device, is_apart))
        if not tensor.is_contiguous():
            self.refuse("strided memory is allocated")

    def _number(self, result: Tensor) -> int:
        """That of a result."""
        number: int
        for number, tensor in enumerate(self._tensors):
            if result is tensor:
                return number
        number, offset = self.recorder.find(result.data_ptr())
        if 0 <= number < self.inputs:
            return self._view_of(number, offset, result)
        memory = self.memory[number - self.inputs] if number >= 0 else None
        if memory is None or not result.numel() or type(result) is not Tensor:
            self.refuse("a result is empty, of a type of its own, or neither an input nor all of an allocation")
            return 0
        if offset or (result.dtype, result.numel()) != (memory.dtype, prod(memory.shape)) or not result.is_contiguous():
            self.refuse("a result is a part of an allocation")
        self.memory[number - self.inputs] = memory._replace(shape=tuple(result.shape), is_apart=True)
        return number

    def _view_of(self, number: int, offset: int, result: Tensor) -> int:
        tensor, strides, start = self._tensors[number], result.stride(), offset // result.element_size()
        if result.dtype != tensor.dtype:
            self.refuse("a result is an input in another dtype")
        same = not start and result.shape == tensor.shape and strides == tensor.stride() and not result._is_view()
        self.views.append(View(number, tuple(result.shape), None if same else strides, start))
        return ~(len(self.views) - 1)


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
            _active.capture.note_written(tensor)


def refuse(reason: str) -> None:
    """Tells the capture, if there is one, that what happens now would not happen in a replay."""
    if _active.capture is not None:
        _active.capture.refuse(reason)
