"""What ``explain`` listens to: kernels, as ops would call them, on tensors that hold no data. And names in profiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class KernelCall(NamedTuple):
    """One kernel: its name, why it and no faster one, its floating-point operations, the bytes that it must move."""

    kernel: str
    reason: str
    flops: int
    bytes: int


@dataclass
class Trace:
    """What one step would run, and what else there is to say about it."""

    calls: list[KernelCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_trace: ContextVar[Trace | None] = ContextVar("fusible_trace", default=None)


def active() -> bool:
    """Whether kernels shall be recorded instead of run."""
    return _trace.get() is not None


def record(call: KernelCall) -> None:
    """Records a kernel."""
    trace = _trace.get()
    if trace is not None:
        trace.calls.append(call)


def note(text: str) -> None:
    """Records a remark, such as a copy that a call costs."""
    trace = _trace.get()
    if trace is not None:
        trace.notes.append(text)


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range of that name in a profile; costs nothing while no profiler runs."""
    return torch.profiler.record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()


@contextmanager
def recording() -> Iterator[Trace]:
    """Records what the body would run."""
    trace = Trace()
    token = _trace.set(trace)
    try:
        yield trace
    finally:
        _trace.reset(token)
