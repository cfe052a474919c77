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
from .capture import TENSOR_TYPES, Capture, Replay
from .guards import Form
from .step import CapturedContext, CapturedStep, attribute_version

_OBSERVERS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("a profiler is active", profiler_enabled),
    ("a transform is active", transforms_active),
    ("a dispatch mode sees every operation", dispatch_mode_depth),  # an export, a counter
)
"""Who observes or transforms what a call does: why it is not replayed, and whether that is so now."""


class CallKey(NamedTuple):
    """What a call depends on: all that is no tensor; the tensors that its ops hold, then its values; the rows of x."""

    key: tuple[Any, ...]
    pool: list[Tensor]
    rows: int


def call_key(layout: FlatContainer, call: BoundArguments, runtime: Runtime) -> CallKey | str:
    """The key of a call on dense tensors of a device that nobody observes or transforms; else why it has none."""
    x = call.values[0]
    if x.device.type not in current_stream:
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
    pool: list[Tensor] = []
    for op in layout.holders:
        if op._modules and computes_parameters(op):
            return "a parametrization computes a parameter"
        pool += op.autograd_inputs(runtime.grad_enabled)
    for value in call.values:
        if type(value) not in TENSOR_TYPES or value.layout is not torch.strided or value.is_nested:
            return "an argument is not a dense tensor of torch's own type"
    pool += call.values
    key = call.reads, runtime, active_config().token, *map(attribute_version, layout.ops), len(pool)
    return CallKey(key, pool, x.shape[0] if x.ndim else 0)


class CapturedCall(NamedTuple):
    """A call that is replayed.

    Attributes:
        results, buffers: their positions in the pool.
        last: what ``explain()`` needs of the call; None where that depends on the rows.
    """

    plan: Plan
    steps: tuple[CapturedStep, ...]
    results: list[int]
    buffers: list[int]
    last: Any

    def run(self, pool: list[Any], addresses: list[int], rows: int) -> Any:
        """Replays the call on a pool, to which the steps add their outputs."""
        stream = stream_of(pool[self.steps[0].reads[0]])
        for step in self.steps:
            step.run(pool, addresses, rows, stream)
        return pool[self.results[0]] if len(self.results) == 1 else tuple([pool[i] for i in self.results])

    def overlaps(self, pool: Sequence[Tensor]) -> bool:
        """Whether a buffer may share memory with anything else, which a plan would look at more closely."""
        spans = list(map(extent, pool))
        sharing = [[a <= end and first <= b for a, b in spans] for first, end in map(spans.__getitem__, self.buffers)]
        return any([sum(each) > 1 for each in sharing])


class CaptureSession:
    """Captures the steps of a call while they run, and files the captured call.

    The pool of a call is the tensors that its ops hold, then the values of the plan: those that the caller gives, and
    the outputs of the steps.
    """

    def __init__(self, form: Form, plan: Plan, key: CallKey, values: list[Any]) -> None:
        self._form, self._plan, self._rows, self._values = form, plan, key.rows, values
        self._held, self._steps = key.pool[: len(key.pool) - len(values)], list[CapturedStep]()
        partner: CapturedCall | None = form.partner
        self._partners = partner.steps if partner is not None and partner.plan is plan else ()
        self._refusal = "" if len({*map(id, key.pool)}) == len(key.pool) else "two tensors of the call are one"

    @classmethod
    def of(cls, form: Form, plan: Plan, key: CallKey, values: list[Any]) -> CaptureSession | None:
        """For a call, but not for the first of its form if no other number of rows has been seen either."""
        reason = plan.replay_refusal
        if reason is None and Capture.find_library() is None:
            reason = "no library is built whose launches can be captured"
        if reason is not None:
            form.refuse(key.rows, reason)
        return cls(form, plan, key, values) if reason is None and form.see(key.rows) else None

    def run(self, step: EagerStep, inputs: Sequence[Tensor], wanted: frozenset[str]) -> ForwardResult:
        """Runs the forward of a step, and captures it."""
        if self._refusal:
            return step.run(inputs[0], wanted)
        tensors, number = step.inputs(inputs[0]), len(self._steps)
        with Capture(tensors, self._rows) as capture:
            result = step.run(inputs[0], wanted)
        reason = capture.finish(result.outputs, (*result.kept, *result.lent) if wanted else ())
        positions = {id(tensor): i for i, tensor in enumerate([*self._held, *self._values])}
        reads, of_autograd = ([positions.get(id(t), -1) for t in each] for each in (tensors, inputs if wanted else ()))
        if reason is None and -1 in (*reads, *of_autograd):
            reason = "reads a tensor that is neither an argument nor held by an op"
        if reason is not None:
            self._refusal = f"{type(step.op).__name__}: {reason}"
            return result
        context, partner = CapturedContext.of(result.context, step.op), self._partners and self._partners[number]
        if partner and partner.context == context:
            context = partner.context  # one family of backwards for all numbers of rows
        replay = Replay.of(capture, partner.replay if partner and partner.context is context else None)
        outputs, last_uses = len(result.outputs), self._positions(self._plan.steps[number].last_uses)
        saved = outputs + len(result.kept)
        self._steps.append(CapturedStep(replay, context, of_autograd, reads, last_uses, outputs, saved))
        return result._replace(context=context)

    def finish(self, last: Any) -> None:
        """Files the captured call, or why one of its steps cannot be replayed."""
        if len(self._steps) < len(self._plan.steps):
            self._refusal = self._refusal or "a step is no launch: it passes x on"
        if self._refusal:
            return self._form.refuse(self._rows, self._refusal)
        results = self._positions(self._plan.results)
        buffers = self._positions([buffer.slot for buffer in self._plan.buffers])
        is_for_any_rows = all([step.replay.sizes is None for step in self._steps])
        steps, last = tuple(self._steps), None if is_for_any_rows else last
        self._form.file(self._rows, CapturedCall(self._plan, steps, results, buffers, last), is_for_any_rows)

    def _positions(self, slots: Sequence[int]) -> list[int]:
        """In the pool, of values of the plan."""
        return [len(self._held) + slot for slot in slots]
