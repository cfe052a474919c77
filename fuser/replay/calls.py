"""Captured calls of a container: binding, plan, checks and steps are known, and only the devices have work left.

A call is replayed if an earlier one with the same :class:`CallKey` and tensors of the same form was captured. The key
holds everything that the call may depend on but the contents of tensors. All steps of its plan are ops that promise to
be replayable, so none of them looks at its arguments again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from .capture import TENSOR_TYPES, Capture
from .guards import Form
from .program import Replay
from .step import CapturedContext, CapturedStep, attribute_version

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
    pool = [*call.values]
    for op in layout.holders:
        if op._modules and computes_parameters(op):
            return "a parametrization computes a parameter"
        pool += op.autograd_inputs(runtime.grad_enabled)
    for value in call.values:
        if type(value) not in TENSOR_TYPES or value.layout is not torch.strided or value.is_nested:
            return "an argument is not a dense tensor of torch's own type"
    x = pool[0]
    key = call.reads, runtime, active_config().token, *map(attribute_version, layout.ops), len(pool)
    return CallKey(key, pool, x.shape[0] if x.ndim else 0)


class CapturedCall(NamedTuple):
    """A call that is replayed.

    Attributes:
        results: their positions in the pool.
        last: what ``explain()`` needs of the call; None where that depends on the rows.
    """

    plan: Plan
    steps: tuple[CapturedStep, ...]
    results: tuple[int, ...]
    last: Any

    def run(self, pool: list[Any], addresses: list[int], rows: int) -> Any:
        """Replays the call on a pool, to which the steps add their outputs."""
        stream = stream_of(pool[0])
        for step in self.steps:
            step.run(pool, addresses, rows, stream)
        return pool[self.results[0]] if len(self.results) == 1 else tuple([pool[i] for i in self.results])

    def overlaps(self, pool: Sequence[Tensor], addresses: Sequence[int]) -> bool:
        """Whether a buffer may share memory with anything else, which a plan would look at more closely."""
        ends = [t.nbytes + a if t.is_contiguous() else extent(t)[1] + 1 for a, t in zip(addresses, pool, strict=True)]
        for buffer in self.plan.buffers:
            first, end = addresses[buffer.slot], ends[buffer.slot]
            if sum([a < end and first < e for a, e in zip(addresses, ends, strict=True)]) > 1:
                return True
        return False

    def joined(self, other: CapturedCall) -> CapturedCall | None:
        """For any number of rows, with a call for another one; None if they do not fit."""
        if self.plan is not other.plan:
            return None
        steps = [a.joined(b) for a, b in zip(self.steps, other.steps, strict=True)]
        fitting = tuple([step for step in steps if step is not None])
        return None if len(fitting) < len(steps) else self._replace(steps=fitting, last=None)


class CaptureSession:
    """Captures the steps of a call while they run, and files the captured call."""

    def __init__(self, form: Form, plan: Plan, key: CallKey, values: int) -> None:
        self._form, self._plan, self._rows = form, plan, key.rows
        self._values, self._held = values, len(key.pool) - values
        self._pool = [*key.pool]  # so that no other tensor can have their ids
        self._position_of = {id(t): position for position, t in enumerate(key.pool)}
        self._steps = list[CapturedStep]()
        self._refusal = "" if len(self._position_of) == len(self._pool) else "two tensors of the call are one"

    @classmethod
    def of(cls, form: Form, plan: Plan, key: CallKey, values: int) -> CaptureSession | None:
        """For a call, but not for the first of its form if no other number of rows has been seen either."""
        reason = plan.replay_refusal
        if reason is None and Capture.find_library() is None:
            reason = "no library is built whose launches can be captured"
        if reason is not None:
            form.refuse(key.rows, reason)
            return None
        return cls(form, plan, key, values) if form.see(key.rows) else None

    def run(self, step: EagerStep, inputs: Sequence[Tensor], wanted: frozenset[str]) -> ForwardResult:
        """Runs the forward of a step, and captures it."""
        tensors = step.inputs(inputs[0])
        with Capture(tensors, self._rows) as capture:
            result = step.run(inputs[0], wanted)
        reason = capture.finish(result.outputs, (*result.kept, *result.lent) if wanted else ())
        reads, of_autograd = (tuple([self._position_of.get(id(t), -1) for t in each]) for each in (tensors, inputs))
        if reason is None and -1 in (*reads, *of_autograd):
            reason = "reads a tensor that is neither an argument nor held by an op"
        replay = Replay.of(capture, capture) if reason is None else None
        if replay is None:
            self._refusal = self._refusal or f"{type(step.op).__name__}: {reason}"
            return result
        number, outputs = len(self._steps), len(result.outputs)
        context = self._context(CapturedContext.of(result.context, step.op))
        last_uses = tuple(map(self._position, self._plan.steps[number].last_uses))
        positions = of_autograd if wanted else (), reads, last_uses
        self._steps.append(CapturedStep(replay, context, *positions, outputs, outputs + len(result.kept)))
        return result._replace(context=context)

    def add_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Adds the outputs of the step that has run."""
        for output in outputs:
            self._position_of[id(output)] = len(self._pool)
            self._pool.append(output)

    def finish(self, last: Any) -> None:
        """Files the captured call, or why one of its steps cannot be replayed."""
        if len(self._steps) < len(self._plan.steps):
            self._refusal = self._refusal or "a step is no launch: it passes x on"
        if self._refusal:
            self._form.refuse(self._rows, self._refusal)
        else:
            results = tuple(map(self._position, self._plan.results))
            self._form.file(self._rows, CapturedCall(self._plan, tuple(self._steps), results, last))

    def _context(self, context: CapturedContext) -> CapturedContext:
        """That of the same step with another number of rows if they are equal: their backwards are one family."""
        steps = () if self._form.first is None else self._form.first.steps[len(self._steps) :]
        return steps[0].context if steps and steps[0].context == context else context

    def _position(self, slot: int) -> int:
        """In the pool, where the tensors that ops hold stand between the values of the call and the outputs."""
        return slot if slot < self._values else slot + self._held
