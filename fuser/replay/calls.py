"""Captured calls of a container: binding, plan, checks and steps are known, and only the devices have work left.

A call is replayed if an earlier one with the same :class:`CallKey` and tensors of the same form was captured. All steps
of its plan are ops that promise to be replayable, so none of them looks at its arguments again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.binding import BoundArguments
from ..compiler.flatten import FlatContainer
from ..compiler.plan import Plan
from ..config import active_config
from ..parametrized import computes_parameters
from ..runtime.autograd import Runtime
from ..runtime.buffers import check_overlaps
from ..runtime.call import EagerStep, ForwardResult
from ..runtime.devices import current_stream, stream_of
from ..torch_private import dispatch_mode_depth, forward_ad_state, profiler_enabled, replay_refusal, transforms_active
from .capture import TENSOR_TYPES, Capture, Replay
from .guards import Form
from .step import CapturedContext, CapturedStep, attribute_version


def observer() -> str | None:
    """Who observes or transforms what a call does, so that it is not replayed; None: nobody."""
    if profiler_enabled():
        return "a profiler is active"
    if transforms_active():
        return "a transform is active"
    if dispatch_mode_depth():  # an export, a counter
        return "a dispatch mode sees every operation"
    return "forward-mode gradients are active" if forward_ad_state._current_level >= 0 else None


class CallKey(NamedTuple):
    """What a call depends on, but for the contents of tensors."""

    key: tuple[Any, ...]  # all that is no tensor
    pool: list[Tensor]  # those that its ops hold, then its values
    rows: int  # of x


def call_key(layout: FlatContainer, call: BoundArguments, runtime: Runtime) -> CallKey | str:
    """The key of a call on dense tensors of a device that nobody observes or transforms; else why it has none."""
    x = call.values[0]
    if x.device.type not in current_stream:
        return ""
    if replay_refusal is not None:
        return replay_refusal
    if any(layout.hooks):
        return "hooks observe an op"
    if (reason := observer()) is not None:
        return reason
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
    """A call that is replayed."""

    plan: Plan
    steps: tuple[CapturedStep, ...]
    held: int  # the tensors that stand in the pool before the values of the plan
    last: Any  # what ``explain()`` needs of the call; None where that depends on the rows

    def run(self, pool: list[Any], addresses: list[int], rows: int) -> Any:
        """Replays the call on a pool, to which the steps add their outputs: so it holds all values of the plan."""
        plan, held, stream = self.plan, self.held, stream_of(pool[self.held])
        if plan.buffers:
            check_overlaps(plan.buffers, plan.inputs, pool[held:], pool[:held])
        for step, planned in zip(self.steps, plan.steps):  # noqa: B905
            step.run(pool, addresses, rows, stream)
            for slot in planned.last_uses:
                pool[held + slot] = None
        results = plan.results
        return pool[held + results[0]] if len(results) == 1 else tuple([pool[held + slot] for slot in results])


class CaptureSession:
    """Captures the steps of a call while they run, and files the captured call."""

    def __init__(self, form: Form, plan: Plan, key: CallKey, values: list[Any]) -> None:
        self._form, self._plan, self._rows, self._values = form, plan, key.rows, values
        self._held, self._steps = key.pool[: len(key.pool) - len(values)], list[CapturedStep]()
        partner: CapturedCall | None = form.partner
        self._partners = partner.steps if partner is not None and partner.plan is plan else ()
        self._refusal = "" if len({*map(id, key.pool)}) == len(key.pool) else "two tensors of the call are one"

    @classmethod
    def of(cls, form: Form, plan: Plan, key: CallKey, values: list[Any]) -> CaptureSession | None:
        """For a call, but not for the first of its form if no other number of rows has been seen either."""
        unbuilt = None if Capture.find_library() else "no library is built whose launches can be captured"
        if (reason := plan.replay_refusal or unbuilt) is not None:
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
        outputs, saved = len(result.outputs), len(result.outputs) + len(result.kept)
        self._steps.append(CapturedStep(replay, context, of_autograd, reads, outputs, saved))
        return result._replace(context=context)

    def finish(self, last: Any) -> None:
        """Files the captured call, or why one of its steps cannot be replayed."""
        if self._refusal:
            return self._form.refuse(self._rows, self._refusal)
        is_for_any_rows = all([step.replay.is_for_any_rows for step in self._steps])
        steps, last = tuple(self._steps), None if is_for_any_rows else last
        self._form.file(self._rows, CapturedCall(self._plan, steps, len(self._held), last), is_for_any_rows)
