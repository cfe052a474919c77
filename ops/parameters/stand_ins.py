"""Stand-in gradients that autograd gets for gradients in ``main_grad``, as hooks of data-parallel training expect."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...fuser.contract.tracing import has_no_data
from ...fuser.runtime.devices import stream_of

_shared: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()


class StandIns:
    """The memory of one op's stand-ins, shared by all ops with weights of the same form and freed with the last of
    them.

    Its values are not gradients: stand-ins of several parameters share memory, and autograd adds to it if a parameter
    keeps its stand-in as ``.grad``. It starts as zeros, so such sums stay finite. Under ``zero_out_wgrad``, where
    values count, a stand-in has its own memory.

    A CUDA graph that captures a use keeps the address, like that of the weights: both live as long as the op.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._stream = -1

    def __reduce__(self) -> tuple[object, ...]:
        return StandIns, ()

    def forget(self) -> None:
        """Drops the reference to the memory."""
        self._memory = None

    def memory(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The shared tensor, which recorders must know; :meth:`of` returns aliases of it."""
        memory = self._memory
        if memory is None or memory.shape != shape or memory.dtype != like.dtype or memory.device != like.device:
            memory = _shared_memory(like, shape)
            self._memory, self._stream = None if has_no_data(memory) else memory, -1
        stream = stream_of(memory)
        if stream != self._stream and memory.device.type == "cuda":
            memory.record_stream(torch.cuda.current_stream(memory.device))  # which may still add to it once it is freed
        self._stream = stream
        return memory

    def of(self, like: Tensor, shape: tuple[int, ...], zeros: bool) -> Tensor:
        """A stand-in of that shape, with the dtype and device of ``like``."""
        if zeros:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self.memory(like, shape).detach()


def _shared_memory(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    key = shape, like.dtype, like.device
    memory = None if has_no_data(like) else _shared.get(key)
    if memory is None:
        with torch.inference_mode(False):
            captured = like.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            make = torch.empty if captured else torch.zeros  # a graph would write the zeros in every replay
            memory = make(shape, dtype=like.dtype, device=like.device)
        if type(memory) is Tensor:
            _shared[key] = memory
    return memory
