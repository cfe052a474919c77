"""Runs on tensors without data: of ``explain``, and of a compiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from .spec import TensorSpec
from .torch_private import FakeTensor, FunctionalTensor, disabled_torch_function


class KernelCall(NamedTuple):
    """One kernel: its name, why it and no faster one, its floating-point operations, the bytes that it must move.

    ``configuration`` is the choice for it in words, such as a tile, if there was one.
    """

    kernel: str
    reason: str
    flops: int
    bytes: int
    configuration: str = ""


@dataclass
class Trace:
    """The kernels that one step would run, and remarks.

    Attributes:
        parameters: tensors that stand for memory of parameters.
    """

    calls: list[KernelCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


_trace: ContextVar[Trace | None] = ContextVar("fusible_trace", default=None)
current_trace = _trace.get
"""Returns the trace that records kernels instead of running them, or None. It is no Python function: hot calls ask."""


def active() -> bool:
    """Whether kernels shall be recorded instead of run."""
    return current_trace() is not None


class NoDataError(RuntimeError):
    """The values of an :class:`Outline` were read."""


class Outline(Tensor):
    """The form of a tensor: shape, dtype, device. Every read of values fails; ``why`` explains their absence."""

    why: str
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, spec: TensorSpec, why: str) -> Outline:
        shape, dtype, device, _, requires_grad = spec
        # without strides, torch would make numbers of the sizes that a compiler keeps symbolic
        strides = None if all([type(size) is int for size in shape]) else contiguous_strides(shape)
        return Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def __init__(self, spec: TensorSpec, why: str) -> None:
        self.why = why

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:  # type: ignore[override]
        raise NoDataError(next(outline.why for outline in _outlines([args, kwargs])))


def _outlines(value: object) -> Iterator[Outline]:
    """The outlines among the arguments of an operation, in order."""
    if isinstance(value, Outline):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _outlines(each)


def contiguous_strides(shape: Sequence[int | torch.SymInt]) -> tuple[int | torch.SymInt, ...]:
    """The strides of a contiguous tensor; symbolic for symbolic sizes."""
    sizes = [torch.sym_max(size, 1) for size in reversed(shape[1:])]  # type: ignore[no-untyped-call]
    return (*accumulate(sizes, mul, initial=1),)[: len(shape)][::-1]


def promised(spec: TensorSpec) -> Outline:
    """Stands in checks for an extra output that an earlier op will give."""
    why = "an earlier op gives this tensor, which is not there yet"
    return Outline(spec._replace(requires_grad=False), why)


WITHOUT_DATA = (FakeTensor, FunctionalTensor, Outline)


def has_no_data(tensor: Tensor) -> bool:
    """Whether a tensor only stands for one: of a compiler's trace, or of :func:`recording`'s."""
    return isinstance(tensor, WITHOUT_DATA)


def is_traced(tensor: Tensor) -> bool:
    """Whether a compiler traces, and wants kernels as custom ops."""
    return has_no_data(tensor) and not active()


def record(call: KernelCall) -> None:
    """Records a kernel."""
    trace = current_trace()
    if trace is not None:
        trace.calls.append(call)


def note(text: str) -> None:
    """Records a remark, such as a copy that a call costs."""
    trace = current_trace()
    if trace is not None:
        trace.notes.append(text)


def stand_for_parameters(*tensors: Tensor) -> None:
    """Records that tensors use the memory of parameters, so that a step that keeps them keeps no additional memory."""
    trace = current_trace()
    if trace is not None:
        trace.parameters.extend(tensors)


@contextmanager
def recording() -> Iterator[Trace]:
    """Records the kernels that the body would run."""
    trace = Trace()
    token = _trace.set(trace)
    try:
        yield trace
    finally:
        _trace.reset(token)
