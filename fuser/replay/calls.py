"""Captured calls of a container: binding, plan, checks and steps are known, and only the devices have work left.

A call is replayed if an earlier one with the same :class:`CallKey` and tensors of the same form was captured. All steps
of its plan are ops that promise to be replayable, so none of them looks at its arguments again. A backward is replayed
if one of the same step was captured on tensors of the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.binding import BoundArguments
from ..compiler.flatten import FlatContainer
from ..compiler.plan import Plan
from ..contract.config import active_config
from ..contract.op import Delivery, Op
from ..contract.parametrized import computes_parameters
from ..contract.torch_private import (
    dispatch_mode_depth,
    forward_ad_state,
    profiler_enabled,
    replay_refusal,
    transforms_active,
)
from ..contract.tracing import current_trace
from ..runtime.autograd import Runtime, apply
from ..runtime.buffers import SlotValues, check_overlaps
from ..runtime.call import BackwardContext, EagerStep, ForwardResult
from ..runtime.devices import current_stream, stream_of
from .capture import TENSOR_TYPES, Capture, Replay
from .guards import Form, GuardedCache, Refusal

_attribute_version = attrgetter("attribute_version")


def observer() -> Refusal | None:
    """The reason not to replay because a trace, profiler, transform or mode observes the call, or None."""
    if current_trace() is not None:
        return Refusal("kernels are recorded, not run")
    if profiler_enabled():
        return Refusal("a profiler is active")
    if transforms_active():
        return Refusal("a transform is active")
    if dispatch_mode_depth():  # an export, a counter
        return Refusal("a dispatch mode sees every operation")
    return Refusal("forward-mode gradients are active") if forward_ad_state._current_level >= 0 else None


class CallKey(NamedTuple):
    """Everything that a call depends on, except the contents of tensors."""

    key: tuple[object, ...]  # all arguments that are not tensors
    pool: list[Tensor]  # those that its ops hold, then its values
    rows: int  # of x


def call_key(layout: FlatContainer, call: BoundArguments, runtime: Runtime) -> CallKey | Refusal:
    """The key of a call on dense tensors of a device without observers or transforms, or the reason why it has none."""
    x = call.values[0]
    if x.device.type not in current_stream:
        return Refusal()
    if replay_refusal is not None:
        return Refusal(replay_refusal)
    if any(layout.hooks):
        return Refusal("hooks observe an op")
    if (reason := observer()) is not None:
        return reason
    pool: list[Tensor] = []
    for op in layout.holders:
        if op._modules and computes_parameters(op):
            return Refusal("a parametrization computes a parameter")
        pool += op.autograd_inputs(runtime.grad_enabled)
    for value in call.values:
        if type(value) not in TENSOR_TYPES or value.layout is not torch.strided or value.is_nested:
            return Refusal("an argument is not a dense tensor of torch's own type")
    pool += call.values
    key = call.reads, runtime, active_config().token, *map(_attribute_version, layout.ops), len(pool)
    return CallKey(key, pool, x.shape[0] if x.ndim else 0)


@dataclass(slots=True)
class CapturedContext(BackwardContext):
    """The context of a captured forward. Its backward is captured once for each form, then replayed."""

    ops: tuple[Op, ...] = ()  # the op and its parts; a capture holds until one of their attributes is assigned
    cache: GuardedCache[Replay] = field(default_factory=GuardedCache, compare=False)  # of backwards

    @classmethod
    def of(cls, context: BackwardContext, op: Op) -> CapturedContext:
        ops = tuple([module for module in op.modules() if isinstance(module, Op)])
        return cls(**{each.name: getattr(context, each.name) for each in fields(context)}, ops=ops)

    def run(
        self,
        tensors: list[Tensor],
        lent: Sequence[Tensor],
        joined: Sequence[Tensor | Sequence[Tensor]],
        douts: tuple[Tensor, ...],
        wanted: frozenset[str],
        requested: Sequence[Delivery],
    ) -> list[Tensor | None]:
        """Runs the backward, by a replay if one has been captured for such tensors."""
        dy, reads = douts[0], [*tensors, *lent, *douts]
        for value in joined:
            reads += (value,) if type(value) is Tensor else value
        effects, facts = [each.side_effects() for each in requested] if requested else (), None
        if effects:
            reads += {id(tensor): tensor for each in effects for tensor in each.tensors}.values()  # each once
            facts = tuple([each.facts for each in effects])
        key, rows = (len(reads), facts, *map(_attribute_version, self.ops)), dy.shape[0] if dy.ndim else 0
        form, entry = self.cache.find(key, reads, rows)
        if isinstance(entry, Replay):
            tensors.clear()  # so that the replay alone has them
            grads: list[Tensor | None] = entry.run(reads, rows, stream_of(dy))
            for each in effects:
                if each.done is not None:
                    each.done()
            return grads
        if entry is not None:
            del reads  # so that the backward alone has them, and lets go of each
            return BackwardContext.run(self, tensors, lent, joined, douts, wanted, requested)
        with Capture(reads, rows, owned=len(tensors)) as capture:
            grads = BackwardContext.run(self, tensors, lent, joined, douts, wanted, requested)
        name, reason = type(self.op).__name__, capture.finish(grads)
        form.file(rows, Refusal(f"{name}.bwd: {reason}") if reason else Replay.of(capture, form.partner))
        return grads


class CapturedStep(NamedTuple):
    """The inputs and results of a step's replay."""

    replay: Replay
    context: CapturedContext
    inputs: list[int]  # the positions in the pool of what autograd is given; nothing where it is not asked
    reads: list[int]  # tensors of the device that is launched on
    outputs: int  # of the results
    saved: int  # of the results, those before buffers of the caller, which autograd does not save

    def run(self, reads: SlotValues, rows: int, stream: int, flags: tuple[bool, ...]) -> ForwardResult:
        """Replays the forward; returns the outputs, and the state of the backward."""
        results, apart = self.replay.run(reads, rows, stream), self.context.apart() if self.context.sources else ()
        kept, lent = results[self.outputs : self.saved], results[self.saved :]
        return ForwardResult(tuple(results[: self.outputs]), kept, apart, lent, self.context)


class LastCall(NamedTuple):
    """The last call, without its tensors, for ``explain()``.

    Attributes:
        shapes: the shape of each value, or the value itself if it is not a tensor.
        replay: a text on whether it replays.
    """

    plan: Plan
    shapes: SlotValues
    runtime: Runtime
    replay: str

    @classmethod
    def of(cls, plan: Plan, call: BoundArguments, runtime: Runtime, replay: str) -> LastCall:
        # a nested tensor, which a module may take, has no shape to keep
        shapes = [(() if v.is_nested else v.shape) if isinstance(v, Tensor) else v for v in call.values]
        return cls(plan, shapes, runtime, replay)


class CapturedCall(NamedTuple):
    """A call that is replayed."""

    plan: Plan
    steps: tuple[CapturedStep, ...]
    held: int  # the tensors that stand in the pool before the values of the plan
    is_for_any_rows: bool
    last: LastCall | None  # None where it depends on the rows

    def run(self, pool: SlotValues, rows: int) -> object:
        """Replays the call on a pool, to which the steps append their outputs, so it holds all values of the plan."""
        plan, held, device = self.plan, self.held, pool[self.held].device
        stream = current_stream[device.type](device.index)
        if plan.buffers:
            check_overlaps(plan.buffers, plan.inputs, pool[held:], pool[:held])
        for step, planned in zip(self.steps, plan.steps):  # noqa: B905
            reads = [*map(pool.__getitem__, step.reads)]
            if step.inputs:
                pool += apply(partial(step.run, reads, rows, stream), *map(pool.__getitem__, step.inputs))
            else:
                pool += step.replay.run(reads, rows, stream)
            for slot in planned.last_uses:
                pool[held + slot] = None
        results = plan.results
        return pool[held + results[0]] if len(results) == 1 else (*map(pool[held:].__getitem__, results),)


class CaptureSession:
    """Captures the steps of a call while they run, and files the captured call."""

    def __init__(self, form: Form[CapturedCall], plan: Plan, key: CallKey, values: SlotValues) -> None:
        self._form, self._plan, self._rows, self._values = form, plan, key.rows, values
        self._held, self._steps = key.pool[: len(key.pool) - len(values)], list[CapturedStep]()
        self._partners, self._refusal = iter(form.partner.steps if form.partner else ()), Refusal()

    @classmethod
    def of(cls, form: Form[CapturedCall], plan: Plan, key: CallKey, values: SlotValues) -> CaptureSession | None:
        """A session for a call, but None for the first of its form, which fills the caches that later ones use."""
        unbuilt = None if Capture.find_library() else "no library is built whose launches can be captured"
        if (reason := plan.replay_refusal or unbuilt) is not None:
            form.file(key.rows, Refusal(reason))
        is_new, form.is_new = form.is_new, False
        return None if is_new or reason is not None else cls(form, plan, key, values)

    def run(self, step: EagerStep, inputs: Sequence[Tensor], flags: tuple[bool, ...]) -> ForwardResult:
        """Runs the forward of a step, and captures it."""
        if self._refusal:
            return step.run(inputs[0], flags)
        wanted, tensors = any(flags), step.inputs(inputs[0])
        with Capture(tensors, self._rows) as capture:
            result = step.run(inputs[0], flags)
        positions = {id(tensor): i for i, tensor in enumerate([*self._held, *self._values])}
        reads, of_autograd = ([positions.get(id(t), -1) for t in each] for each in (tensors, inputs if wanted else ()))
        if -1 in (*reads, *of_autograd):
            capture.refuse("reads a tensor that is neither an argument nor held by an op")
        if reason := capture.finish(result.outputs, (*result.kept, *result.lent) if wanted else ()):
            self._refusal = Refusal(f"{type(step.op).__name__}: {reason}")
            return result
        context, first, partner = CapturedContext.of(result.context, step.op), None, next(self._partners, None)
        if partner is not None and partner.context == context:
            first, context = partner.replay, partner.context  # one family of backwards for all numbers of rows
        outputs, saved = len(result.outputs), len(result.outputs) + len(result.kept)
        self._steps.append(CapturedStep(Replay.of(capture, first), context, of_autograd, reads, outputs, saved))
        return result._replace(context=context)

    def finish(self, last: LastCall) -> None:
        """Files the captured call, or the reason why one of its steps cannot be replayed."""
        any_rows, steps = all([step.replay.is_for_any_rows for step in self._steps]), tuple(self._steps)
        captured = CapturedCall(self._plan, steps, len(self._held), any_rows, None if any_rows else last)
        self._form.file(self._rows, self._refusal or captured)
