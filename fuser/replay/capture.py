"""Captures a run on a device: the tensors that it creates, and the launches that the library records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..contract.torch_private import address_function, without_dispatch_modes
from ..runtime.buffers import SlotValues, extent
from . import counts

if TYPE_CHECKING:
    from ..contract.torch_private import OpOverload

aten = torch.ops.aten
_ALLOCATIONS = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default}
_ALLOCATIONS |= {aten.new_empty.default, aten.new_empty_strided.default}
TENSOR_TYPES = {Tensor, torch.nn.Parameter}
Allocation: TypeAlias = tuple[Callable[..., Tensor], tuple[int, ...]]  # what allocates it, and its sizes
LARGE = 2**24  # bytes that a replay does not hold until its end, if it need not


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a run. Any operation other than an allocation, a view or a launch of the library prevents replays.

    Attributes:
        memory: the memory of allocated results, without their first sizes.
        views: the results that are inputs: the number of each input, and the shape of its view; None: it is detached.
        results: the number of each result: inputs first, then ``memory``; -1 for None, and views from -2 down.
        written: the inputs whose versions change.
    """

    find_library: Callable[[], Any] = staticmethod(lambda: None)  # set by the library whose launches can be captured

    def __init__(self, inputs: Sequence[Tensor], rows: int, owned: int = 0) -> None:
        """Starts the capture; ``owned``: how many of the first inputs have no other owner during a replay."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.device, self._inputs = rows, inputs[0].device, inputs
        self._versions = {i: t._version for i, t in enumerate(inputs) if not t.is_inference()}  # these count none
        self.memory, self.views = list[Allocation](), list[tuple[int, tuple[int, ...] | None]]()
        spans = [(first, last + 1 - first) for first, last in map(extent, inputs)]
        long = [i for i, t in enumerate(inputs[:owned]) if type(t) is Tensor and t.dim() and not t.shape[0] % rows]
        self.recorder = self.find_library().Capture(spans, rows, long)
        self.refuse: Callable[[str], None] = self.recorder.refuse

    def __enter__(self) -> Capture:
        self.recorder.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.recorder.__exit__(*error)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            first, last = extent(result)  # bytes are workspaces, whose sizes may be rounded
            self.recorder.allocated(first, last + 1 - first, result.dtype is not torch.uint8)
        elif not func.is_view and func is not aten.promote_types.default:
            self.refuse(f"{func} runs")
        return result

    def finish(self, outputs: Sequence[Tensor | None], kept: Sequence[Tensor] = ()) -> str | None:
        """Records the results and drops the inputs; returns the reason why the run cannot be replayed, or None.

        Outputs are allocated in the run, detached inputs, or None. Other kept tensors may also be viewed inputs.
        """
        tensors = [tensor for tensor in (*outputs, *kept) if tensor is not None]
        if not {*map(type, self._inputs), *map(type, tensors)} <= TENSOR_TYPES:
            self.refuse("a tensor is of a type of its own")
        self.written = [i for i, version in self._versions.items() if self._inputs[i]._version != version]
        numbers = {id(t): i for i, t in enumerate(self._inputs)}
        for tensor in tensors:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = self._number(tensor)
        self.results = [numbers.get(id(tensor), -1) for tensor in (*outputs, *kept)]
        viewed = [~i for i, (_, shape) in enumerate(self.views, 1) if shape is not None]
        if not {*viewed, *range(len(self._inputs))}.isdisjoint(self.results[: len(outputs)]):
            self.refuse("a result is an input")
        self.views.reverse()
        self.form, self._inputs = (self.results, self.views, self.written, self.memory), ()
        return self.recorder.refusal  # type: ignore[no-any-return]

    def _number(self, result: Tensor) -> int:
        """The recorder's number of a result that is not an input; arbitrary if replay cannot produce it."""
        is_dense, (first, last) = result.ndim > 0 and result.is_contiguous(), extent(result)
        number: int = self.recorder.result(first, last + 1 - first, result.shape[0] if is_dense else -1)
        if not 0 <= number < len(self._inputs):
            self.memory.append((allocator(result.dtype, result.device), tuple(result.shape[1:])))
            return number
        tensor = self._inputs[number]
        is_viewed = result._is_view() or (result.shape, result.stride()) != (tensor.shape, tensor.stride())
        if result.dtype != tensor.dtype or (is_viewed and not (is_dense and tensor.is_contiguous())):
            self.refuse("a result is an input")
        self.views.append((number, (-1, *result.shape[1:]) if is_viewed else None))
        return ~len(self.views)


class Replay(NamedTuple):
    """Launches and the tensors that they need."""

    capture: Capture
    launches: Any
    memory: list[Allocation]  # of each result, then of bytes
    is_for_any_rows: bool

    @classmethod
    def of(cls, capture: Capture, first: Replay | None) -> Replay:
        """A replay for any number of rows if the capture fits the ``first`` of its form; else for its own number.

        The library declares which numbers of a launch count rows, and the size of the workspace by rows; the first size
        of a tensor may vary. The second capture shows whether a size only happens to equal the number of rows.
        """
        partner = first.capture.recorder if first is not None and first.capture.form == capture.form else None
        launches = capture.recorder.launches(partner, LARGE)
        scratch = allocator(torch.uint8, capture.device), ()
        return cls(capture, launches, [*capture.memory, scratch], launches.for_any_rows)

    def run(self, tensors: SlotValues, rows: int, stream: int) -> SlotValues:
        """Runs the launches for these inputs and returns the results.

        Inputs that launches still need are removed from the list.
        """
        counts.replayed += 1
        written = [*map(tensors.__getitem__, self.capture.written)]
        views = list[Tensor]()
        for i, view in self.capture.views:
            views += (tensors[i].detach() if view is None else tensors[i].view(view),)
        self.launches.run(tensors, self.memory, address_function, rows, stream)
        if written:
            torch.autograd.graph.increment_version(written)
        tensors += (*views, None)
        return [*map(tensors.__getitem__, self.capture.results)]


@cache
def allocator(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """The fastest function that allocates a tensor of a shape; the same object for all captures."""
    with without_dispatch_modes():
        return torch.empty(0, dtype=dtype, device=device).new_empty


def is_active() -> bool:
    """Whether the calls of this thread are captured."""
    library = Capture.find_library()
    return library is not None and bool(library.is_capturing())


def refuse(reason: str) -> None:
    """Makes the capture of this thread, if any, refuse replays, as the current operation would not be replayed."""
    if (library := Capture.find_library()) is not None:
        library.refuse(reason)
