"""Captured calls of a container: binding, plan, checks and steps are known, and only the devices have work left.

A call is replayed if an earlier one with the same :class:`CallKey` and tensors of the same form was captured. The key
holds everything that the call may depend on but the contents of tensors. All steps of its plan are ops that promise to
be replayable, so none of them looks at its arguments again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.binding import BoundArguments
from ..compiler.flatten import FlatContainer
from ..compiler.plan import Plan
from ..config import active_config
from ..parametrized import computes_parameters
from ..runtime.autograd import Runtime
from ..runtime.buffers import extent
from ..runtime.call import EagerStep, ForwardResult
from ..runtime.devices import current_stream, stream_of
from ..torch_private import dispatch_mode_depth, forward_ad_state, profiler_enabled, replay_refusal, transforms_active
from .capture import TENSOR_TYPES, Capture, Recording
from .guards import DynamicRows, GuardedEntry
from .program import Captured
from .step import CapturedContext, CapturedStep

_OBSERVERS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("a profiler is active", profiler_enabled),
    ("a transform is active", transforms_active),
    ("a dispatch mode sees every operation", dispatch_mode_depth),  # an export, a counter
)
"""Who observes or transforms what a call does: why it is not replayed, and whether that is so now."""


class CallKey(NamedTuple):
    """What a call depends on.

    Attributes:
        key: all that is no tensor.
        pool: the tensors that the caller gives, then those that the ops hold.
        rows: the number of rows of ``x``.
    """

    key: tuple[Any, ...]
    pool: list[Tensor]
    rows: int


def call_key(layout: FlatContainer, call: BoundArguments, runtime: Runtime) -> CallKey | str:
    """The key of a call on dense tensors of a device that nobody observes or transforms; else why it has none."""
    if call.values[0].device.type not in current_stream:
        return ""
    if replay_refusal is not None:
        return replay_refusal
    if any(layout.hooks):
        return "hooks observe an op"
    for reason, is_active in _OBSERVERS:
        if is_active():
            return reason
    if forward_ad_state._current_level >= 0:
        return "forward-mode gradients are active"
    key: list[Any] = [call.reads, runtime, active_config().token]
    key += [op.attribute_version for op in layout.ops]
    pool = [*call.values]
    for op in layout.holders:
        if op._modules and computes_parameters(op):
            return "a parametrization computes a parameter"
        pool += op.autograd_inputs(runtime.grad_enabled)
    for value in call.values:
        if type(value) not in TENSOR_TYPES or value.layout is not torch.strided or value.is_nested:
            return "an argument is not a dense tensor of torch's own type"
    x = pool[0]
    return CallKey((*key, len(pool)), pool, x.shape[0] if x.ndim else 0)


def refusal(entry: GuardedEntry | DynamicRows, pool: Sequence[Tensor], addresses: list[int]) -> str | None:
    """Why a call on these tensors is neither captured nor replayed; None: it may be."""
    if entry.refusal is not None:
        return str(entry)
    if reduce(or_, addresses) & 15:  # some kernels choose their way by the last bits of an address
        return "not replayed: an address is not aligned to 16 bytes"
    call = entry.captured
    if call is not None and call.call.plan.buffers and call.call.overlaps(pool, addresses):
        return "not replayed: a buffer may share memory with another tensor"
    return None


class CapturedCall(NamedTuple):
    """A call that is replayed, for whatever number of rows."""

    plan: Plan
    steps: tuple[CapturedStep, ...]
    results: tuple[int, ...]

    def overlaps(self, pool: Sequence[Tensor], addresses: Sequence[int]) -> bool:
        """Whether a buffer may share memory with anything else, which a plan would look at more closely."""
        ends = [t.nbytes + a if t.is_contiguous() else extent(t)[1] + 1 for a, t in zip(addresses, pool, strict=True)]
        for buffer in self.plan.buffers:
            first, end = addresses[buffer.slot], ends[buffer.slot]
            if sum([a < end and first < e for a, e in zip(addresses, ends, strict=True)]) > 1:
                return True
        return False


def replay_call(captured: Captured, pool: list[Any], addresses: list[int], rows: int) -> Any:
    """Replays a call on a pool, to which the steps add their outputs."""
    stream, call = stream_of(pool[0]), captured.call
    for step, replay in zip(call.steps, captured.replays):  # noqa: B905
        step.run(replay, pool, addresses, rows, stream)
    return pool[call.results[0]] if len(call.results) == 1 else tuple([pool[i] for i in call.results])


def start_capture(entry: GuardedEntry | DynamicRows, plan: Plan, key: CallKey, values: int) -> CaptureSession | None:
    """Captures a call, but not the first of its form if no other number of rows has been seen either."""
    assert isinstance(entry, GuardedEntry)  # the others have a capture
    if plan.replay_refusal is not None:
        entry.refuse(plan.replay_refusal)
    elif entry.see():
        return CaptureSession(entry, plan, key, values)
    return None


class CaptureSession:
    """Captures the steps of a call while they run, and files the captured call under its entry."""

    def __init__(self, entry: GuardedEntry, plan: Plan, key: CallKey, values: int) -> None:
        self._entry, self._plan, self._rows = entry, plan, key.rows
        self._values, self._held = values, len(key.pool) - values
        self._position_of = {id(t): position for position, t in enumerate(key.pool)}
        self._pool: list[Any] = list(key.pool)  # so that no other tensor can have their ids
        self._recordings, self._steps = list[Recording](), list[CapturedStep]()
        self._refusal = "two tensors of the call are one" if len(self._position_of) < len(self._pool) else None

    def run(self, step: EagerStep, inputs: Sequence[Tensor], wanted: frozenset[str]) -> ForwardResult:
        """Runs the forward of a step, and captures it."""
        tensors = step.inputs(inputs[0])
        with Capture(tensors, self._rows) as capture:
            result = step.run(inputs[0], wanted)
        recording = capture.recording(result.outputs, (*result.kept, *result.lent) if wanted else ())
        if recording is None:
            self._refuse(f"{type(step.op).__name__}: {capture.refusal}")
        elif any(id(t) not in self._position_of for t in (*inputs, *tensors)):
            self._refuse(f"{type(step.op).__name__} reads a tensor that is neither an argument nor held by an op")
        else:
            context = self._context(CapturedContext.of(result.context, step.op))
            differentiated, reads = (
                tuple([self._position_of[id(t)] for t in each]) for each in (inputs if wanted else (), tensors)
            )
            whole = reads == tuple(range(len(self._pool)))
            last_uses = tuple(map(self._position, self._plan.steps[len(self._steps)].last_uses))
            outputs, saved = len(result.outputs), len(result.outputs) + len(result.kept)
            self._recordings.append(recording)
            self._steps.append(
                CapturedStep(context, differentiated, None if whole else reads, last_uses, outputs, saved)
            )
            return result._replace(context=context)
        return result

    def add_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Adds the outputs of the step that has run."""
        for output in outputs:
            self._position_of[id(output)] = len(self._pool)
            self._pool.append(output)

    def finish(self, last: Any) -> None:
        """Files the captured call, or why one of its steps cannot be replayed."""
        if len(self._steps) < len(self._plan.steps):
            self._refuse("a step is no launch: it passes x on")
        if self._refusal is not None:
            self._entry.refuse(self._refusal)
        else:
            call = CapturedCall(self._plan, tuple(self._steps), tuple(map(self._position, self._plan.results)))
            self._entry.file(Captured.of(self._recordings, call, last))

    def _context(self, context: CapturedContext) -> CapturedContext:
        """That of the same step with another number of rows if they are equal: their backwards are one family."""
        first, number = self._entry.dynamic_rows.first, len(self._steps)
        if first is not None and number < len(first.call.steps) and first.call.steps[number].context == context:
            return first.call.steps[number].context  # type: ignore[no-any-return]
        return context

    def _refuse(self, reason: str) -> None:
        self._refusal = self._refusal or reason

    def _position(self, slot: int) -> int:
        """In the pool, where the tensors that ops hold stand between the values of the call and the outputs."""
        return slot if slot < self._values else slot + self._held
