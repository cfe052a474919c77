"""Captures what a run does on a device: the tensors that it creates, and the launches that the library notes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.buffers import extent
from ..torch_private import without_dispatch_modes

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
TENSOR_TYPES = (Tensor, torch.nn.Parameter)
View: TypeAlias = tuple[int, tuple[int, ...] | None]
LARGE = 2**20  # bytes of allocations that stay apart: an allocator finds those of the calls before


class Created(NamedTuple):
    """Memory that a run allocates. If ``factor`` is not 0, a first size precedes the others: so many times the rows."""

    allocate: Callable[..., Tensor]
    sizes: tuple[int, ...]
    factor: int = 0


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a run. Any operation but an allocation, a view or a launch of the library makes it impossible to replay.

    Attributes:
        recorder: the library's own capture, of the launches.
        memory: all that is allocated; ``apart``: the numbers of the results in it, then of other large pieces.
        views: results that are inputs: the position of one, and as what shape it is viewed; None: it is detached.
        results: positions among the inputs and what is apart; ``~i`` for view ``i``.
        written: the inputs whose versions change.
        find_library: finds the compiled library whose launches can be captured, or returns None.
    """

    find_library: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, inputs: Sequence[Tensor], rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self._inputs, self._versions, self._refusal = rows, inputs, list(map(_version, inputs)), ""
        self.memory, self.apart, self._large = list[Created](), list[int](), list[int]()
        self.views, self.results, self.written = list[View](), list[int | None](), list[int]()
        spans = [(first, last + 1 - first) for first, last in map(extent, inputs)]
        self.recorder = self.find_library().Capture(spans, rows)
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

    def finish(self, outputs: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> str | None:
        """Notes the results, and lets go of the inputs; returns why the run cannot be replayed.

        Args:
            outputs: each allocated in the run, an input detached, or None; one tensor may be several of them.
            kept: what else it leaves: allocated in the run, an input, or a view of one.
        """
        self.written = [i for i, t in enumerate(self._inputs) if _version(t) != self._versions[i]]
        results = {id(tensor): tensor for tensor in (*outputs, *kept) if tensor is not None}
        positions = {key: self._position(tensor) for key, tensor in results.items()}
        self.results = [positions.get(id(tensor)) for tensor in (*outputs, *kept)]
        viewed = [~i for i, (_, shape) in enumerate(self.views) if shape is not None]
        if not {*viewed, *range(len(self._inputs))}.isdisjoint(self.results[: len(outputs)]):
            self.refuse("a result is an input")
        self.form = self.results, self.views, self.written, [*self.apart]
        self.apart += [number for number in self._large if number not in self.apart]
        self._inputs = ()
        return self.refusal

    def _allocated(self, tensor: Tensor) -> None:
        is_bytes = tensor.dtype is torch.uint8  # bytes are workspaces, whose sizes may be rounded
        is_workspace = self.recorder.allocated(tensor.data_ptr(), tensor.nbytes, not is_bytes) or is_bytes
        if tensor.nbytes >= LARGE and not is_workspace:
            self._large.append(len(self.memory))
        self.device = tensor.device
        self.memory.append(Created(allocator(tensor.dtype, tensor.device), tuple(tensor.shape)))
        if not tensor.is_contiguous():
            self.refuse("strided memory is allocated")

    def _position(self, result: Tensor) -> int:
        """Of a result; any number, if it is one that a replay could not give."""
        for position, tensor in enumerate(self._inputs):
            if result is tensor:
                return position
        number, offset = self.recorder.find(result.data_ptr())
        if number < 0 or type(result) is not Tensor:
            self.refuse("a result is empty, of a type of its own, or neither an input nor all of an allocation")
        elif number < len(self._inputs):
            self.views.append((number, self._viewed(self._inputs[number], result)))
            return ~(len(self.views) - 1)
        else:
            self._return_all_of(number - len(self._inputs), offset, result)
        return len(self._inputs) + len(self.apart) - 1

    def _viewed(self, tensor: Tensor, result: Tensor) -> tuple[int, ...] | None:
        """As what shape an input is viewed in a result, for any number of rows; None: it is detached."""
        starts_there = (result.data_ptr(), result.dtype) == (tensor.data_ptr(), tensor.dtype)
        differs = result._is_view() or (result.shape, result.stride()) != (tensor.shape, tensor.stride())
        is_dense = all([result.ndim, result.is_contiguous(), tensor.is_contiguous()])
        if not starts_there or (differs and not is_dense):
            self.refuse("a result is an input")
        return (-1, *result.shape[1:]) if differs else None

    def _return_all_of(self, number: int, offset: int, result: Tensor) -> None:
        """Makes an allocation a result, which must be all of it."""
        allocate, sizes, _ = self.memory[number]
        if (allocator(result.dtype, result.device), result.numel(), offset) != (allocate, prod(sizes), 0):
            self.refuse("a result is a part of an allocation")
        if not result.ndim or not result.is_contiguous() or number in self.apart:
            self.refuse("a result has no dims or is strided, or two are one allocation")
        self.memory[number] = Created(allocate, tuple(result.shape))
        self.apart.append(number)


_active: ContextVar[Capture | None] = ContextVar("capture", default=None)  # of this thread


@cache
def allocator(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Allocates a tensor of a shape: the function that does so fastest, and for all captures the same."""
    with without_dispatch_modes():
        return torch.empty(0, dtype=dtype, device=device).new_empty


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # that of an inference tensor is not counted


def register_library(find: Callable[[], Any]) -> None:
    """Names the library whose launches can be captured; ``find`` returns None where it is not built."""
    Capture.find_library = staticmethod(find)


def refuse(reason: str) -> None:
    """Tells the capture of this thread, if there is one, that what happens now would not happen in a replay."""
    if (capture := _active.get()) is not None:
        capture.refuse(reason)
