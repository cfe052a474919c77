"""Captures what a run does on a device: the tensors that it creates, and the launches that the library notes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.buffers import extent
from ..torch_private import without_dispatch_modes
from .stats import counts

aten = torch.ops.aten
_ALLOCATIONS = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default}
_ALLOCATIONS |= {aten.new_empty.default, aten.new_empty_strided.default}
TENSOR_TYPES = (Tensor, torch.nn.Parameter)
Allocation: TypeAlias = tuple[Callable[..., Tensor], tuple[int, ...]]  # what allocates it, and its sizes
LARGE = 2**20  # bytes of memory that is no piece of the scratch memory: an allocator finds that of the calls before


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a run. Any operation but an allocation, a view or a launch of the library makes it impossible to replay.

    Attributes:
        memory: of results that are allocated, without their first sizes.
        views: the results that are inputs: the number of each, and as what shape it is viewed; None: it is detached.
        results: of each result the number, inputs first, then ``memory``; ``~i`` for view ``i``, from the last one.
        written: the inputs whose versions change.
    """

    find_library: Callable[[], Any] = staticmethod(lambda: None)  # set by the library whose launches can be captured

    def __init__(self, inputs: Sequence[Tensor], rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.device, self._inputs, self._versions = rows, inputs[0].device, inputs, [*map(_version, inputs)]
        self.memory, self.views = list[Allocation](), list[tuple[int, tuple[int, ...] | None]]()
        spans = [(first, last + 1 - first) for first, last in map(extent, inputs)]
        self.recorder = self.find_library().Capture(spans, rows)
        self.refuse: Callable[[str], None] = self.recorder.refuse
        if any(type(t) not in TENSOR_TYPES for t in inputs):
            self.refuse("a tensor is of a type of its own")

    def __enter__(self) -> Capture:
        _active.set(self)
        self.recorder.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _active.set(None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.recorder.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            first, last = extent(result)  # bytes are workspaces, whose sizes may be rounded
            self.recorder.allocated(first, last + 1 - first, result.dtype is not torch.uint8)
        elif not func.is_view and func is not aten.promote_types.default:
            self.refuse(f"{func} runs")
        return result

    def finish(self, outputs: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> str | None:
        """Notes the results, and lets go of the inputs; returns why the run cannot be replayed.

        Outputs are allocated in the run, inputs detached, or None. What it keeps besides may also be inputs, viewed.
        """
        self.written = [i for i, t in enumerate(self._inputs) if _version(t) != self._versions[i]]
        numbers = {id(t): i for i, t in enumerate(self._inputs)}
        for tensor in (*outputs, *kept):
            if tensor is not None and id(tensor) not in numbers:
                numbers[id(tensor)] = self._number(tensor)
        self.results = [numbers.get(id(tensor)) for tensor in (*outputs, *kept)]
        viewed = [~i for i, (_, shape) in enumerate(self.views) if shape is not None]
        if not {*viewed, *range(len(self._inputs))}.isdisjoint(self.results[: len(outputs)]):
            self.refuse("a result is an input")
        self.views.reverse()
        self.form, self._inputs = (self.results, self.views, self.written, self.memory), ()
        refusal: str | None = self.recorder.refusal
        return refusal

    def _number(self, result: Tensor) -> int:
        """Of a result that is no input; any, if it is one that a replay could not give."""
        first_size = result.shape[0] if result.ndim else 0
        number: int = self.recorder.result(result.data_ptr(), result.nbytes, first_size)
        if number < 0 or type(result) is not Tensor:
            self.refuse("a result is empty, of a type of its own, or neither an input nor all of an allocation")
        elif number < len(self._inputs):
            self.views.append((number, self._viewed(self._inputs[number], result)))
            return ~(len(self.views) - 1)
        elif not result.ndim or not result.is_contiguous():
            self.refuse("a result has no dims or is strided")
        self.memory.append((allocator(result.dtype, result.device), tuple(result.shape[1:])))
        return number

    def _viewed(self, tensor: Tensor, result: Tensor) -> tuple[int, ...] | None:
        """As what shape an input is viewed in a result, for any number of rows; None: it is detached."""
        memory, of_result = [(t.data_ptr(), t.dtype, t.nbytes) for t in (tensor, result)]
        differs = result._is_view() or (result.shape, result.stride()) != (tensor.shape, tensor.stride())
        is_dense = all([result.ndim, result.is_contiguous(), tensor.is_contiguous()])
        if memory != of_result or (differs and not is_dense):
            self.refuse("a result is an input")
        return (-1, *result.shape[1:]) if differs else None


_active: ContextVar[Capture | None] = ContextVar("capture", default=None)  # of this thread


class Replay(NamedTuple):
    """Launches, and the tensors that they need."""

    capture: Capture
    launches: Any
    memory: list[Allocation]  # of results, then large pieces, then one piece of scratch memory for all others
    is_for_any_rows: bool  # the launches tell the first sizes of the memory then

    @classmethod
    def of(cls, capture: Capture, first: Replay | None) -> Replay:
        """For any number of rows, if a capture fits the ``first`` of its form; else for its own number.

        The library declares which numbers of a launch count rows, and how large a workspace is for how many; of a
        tensor the first size may vary. The second capture tells whether one only happens to be the number of rows.
        """
        joined = None
        if first is not None and first.capture.form == capture.form and first.capture.rows != capture.rows:
            joined = first.capture.recorder.launches(capture.recorder, LARGE)
        launches = joined or capture.recorder.launches(capture.recorder, LARGE)
        sizes, allocate = launches.sizes(capture.rows), allocator(torch.uint8, capture.device)
        memory = capture.memory + [(allocate, ())] * (len(sizes) - len(capture.memory))
        if joined is None:
            memory = [(allocate, (size, *rest)) for size, (allocate, rest) in zip(sizes, memory, strict=True)]
        return cls(capture, launches, memory, joined is not None)

    def run(self, tensors: list[Any], addresses: list[int], rows: int, stream: int) -> list[Any]:
        """The results for inputs with these addresses; to both lists is added what is allocated."""
        counts.replayed += 1
        sizes = iter(self.launches.sizes(rows)) if self.is_for_any_rows else None
        for allocate, shape in self.memory:
            tensor = allocate(*shape) if sizes is None else allocate(next(sizes), *shape)
            tensors += (tensor,)
            addresses += (tensor.data_ptr(),)
        self.launches.run(addresses, rows, stream)
        if self.capture.written:
            torch.autograd.graph.increment_version([tensors[i] for i in self.capture.written])
        for source, view in self.capture.views:
            tensor = tensors[source]
            tensors += (tensor.detach() if view is None else tensor.view(view),)
        return [None if i is None else tensors[i] for i in self.capture.results]


@cache
def allocator(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Allocates a tensor of a shape: the function that does so fastest, and for all captures the same."""
    with without_dispatch_modes():
        return torch.empty(0, dtype=dtype, device=device).new_empty


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # that of an inference tensor is not counted


def is_active() -> bool:
    """Whether this thread captures."""
    return _active.get() is not None


def refuse(reason: str) -> None:
    """Tells the capture of this thread, if there is one, that what happens now would not happen in a replay."""
    if (capture := _active.get()) is not None:
        capture.refuse(reason)
