"""Captured calls of a container: binding, plan, checks and steps are known, and only the devices have work left.

A call is replayed if an earlier one with the same :class:`CallKey` and tensors of the same form was captured. The key
holds everything that the call may depend on but the contents of tensors. All steps of its plan are ops that promise to
be replayable, so none of them looks at its arguments again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..compiler.binding import BoundArguments
from ..compiler.flatten import FlatContainer
from ..compiler.plan import Plan
from ..config import active_config
from ..op import Op
from ..parametrized import computes_parameters
from ..runtime.autograd import Runtime
from ..runtime.buffers import extent
from ..runtime.call import EagerStep, ForwardResult
from ..runtime.devices import current_stream, stream_of
from .capture import PLAIN, Capture
from .captured import replay_of
from .guards import DynamicRows, GuardedCache, GuardedEntry
from .step import CapturedContext, CapturedStep


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
    if any(layout.hooks):
        return "hooks observe an op"
    if torch._C._autograd._profiler_enabled() or torch._C._are_functorch_transforms_active():
        return "a profiler or a transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode gradients are active"
    if torch._C._len_torch_dispatch_stack():  # an export, a counter
        return "a dispatch mode sees every operation"
    key: list[Any] = [call.reads, runtime, active_config().token]
    key += [op.attribute_version for op in layout.ops]
    pool = [*call.values]
    for op in layout.holders:
        if op._modules and computes_parameters(op):
            return "a parametrization computes a parameter"
        pool += op.autograd_inputs(runtime.grad_enabled)
    for value in call.values:
        if type(value) not in PLAIN or value.layout is not torch.strided or value.is_nested:
            return "an argument is not a dense tensor of torch's own type"
    x = pool[0]
    return CallKey((*key, len(pool)), pool, x.shape[0] if x.dim() else 0)


class CapturedCall(NamedTuple):
    """A call that is replayed. ``last`` is what ``explain()`` needs of it, None where that depends on the rows."""

    plan: Plan
    steps: tuple[CapturedStep, ...]
    results: tuple[int, ...]
    last: Any

    @classmethod
    def joined(cls, several: Sequence[CapturedCall]) -> CapturedCall | None:
        """For any number of rows, from calls of different ones; None where they do not fit together."""
        steps = list[CapturedStep]()
        for same in zip(*[call.steps for call in several], strict=True):
            joined = CapturedStep.joined(same)
            if joined is None:
                return None
            steps.append(joined)
        return several[0]._replace(steps=tuple(steps), last=None)

    def overlaps(self, pool: Sequence[Tensor], addresses: Sequence[int]) -> bool:
        """Whether a buffer may share memory with anything else, which a plan would look at more closely."""
        ends = [a + (t.nbytes if t.is_contiguous() else _reach(t)) for a, t in zip(addresses, pool, strict=True)]
        for buffer in self.plan.buffers:
            first, end = addresses[buffer.slot], ends[buffer.slot]
            if sum([a < end and first < e for a, e in zip(addresses, ends, strict=True)]) > 1:
                return True
        return False

    def run(self, pool: list[Any], addresses: list[int], rows: int) -> Any:
        """Runs on a pool, to which the steps add their outputs."""
        stream = stream_of(pool[0])
        for step in self.steps:
            step.run(pool, addresses, rows, stream)
        return pool[self.results[0]] if len(self.results) == 1 else tuple([pool[i] for i in self.results])


Calls = GuardedCache[CapturedCall]
Entry = GuardedEntry[CapturedCall] | DynamicRows[CapturedCall]


def refusal(entry: Entry, pool: Sequence[Tensor], addresses: list[int]) -> str | None:
    """Why a call on these tensors is neither captured nor replayed; None: it may be."""
    if entry.refusal is not None:
        return str(entry)
    if reduce(or_, addresses) & 15:  # some kernels choose their way by the last bits of an address
        return "not replayed: an address is not aligned to 16 bytes"
    call = entry.capture
    if call is not None and call.plan.buffers and call.overlaps(pool, addresses):
        return "not replayed: a buffer may share memory with another tensor"
    return None


def start_capture(entry: Entry, plan: Plan, key: CallKey, values: int) -> CaptureSession | None:
    """Captures a call, but not the first of its form if no other number of rows has been seen either."""
    assert isinstance(entry, GuardedEntry)  # the others have a capture
    if plan.replay_refusal is not None:
        entry.refuse(plan.replay_refusal)
    elif entry.see():
        return CaptureSession(entry, plan, key, values)
    return None


def _reach(tensor: Tensor) -> int:
    first, last = extent(tensor)
    return last + 1 - first


class CaptureSession:
    """Captures the steps of a call while they run, and files the captured call under its entry."""

    def __init__(self, entry: GuardedEntry[CapturedCall], plan: Plan, key: CallKey, values: int) -> None:
        self._entry = entry
        self._contexts: list[CapturedContext] = entry.dynamic_rows.contexts
        self._plan, self._values, self._before, self._rows = plan, values, len(key.pool), key.rows
        self._position_of = {id(t): position for position, t in enumerate(key.pool)}
        self._pool: list[Any] = list(key.pool)  # so that no other tensor can have their ids
        self._steps: list[CapturedStep] = []
        self._refusal = "two tensors of the call are one" if len(self._position_of) < len(self._pool) else None

    def run(self, step: EagerStep, inputs: Sequence[Tensor], wanted: frozenset[str]) -> ForwardResult:
        """Runs the forward of a step, and captures it."""
        given = step.inputs(inputs[0])
        with Capture(given, self._rows) as capture:
            result = step.run(inputs[0], wanted)
        captured = capture.result(result.outputs, (*result.kept, *result.lent) if wanted else ())
        replay = captured and replay_of([captured])
        if captured is None or replay is None:
            self._refuse(f"{type(step.op).__name__}: {capture.refusal}")
        elif any(id(t) not in self._position_of for t in (*inputs, *given)):
            self._refuse(f"{type(step.op).__name__} reads a tensor that is neither an argument nor held by an op")
        else:
            asked, reads = (tuple([self._position_of[id(t)] for t in ts]) for ts in (inputs if wanted else (), given))
            dead = tuple(map(self._position, self._plan.steps[len(self._steps)].last_uses))
            context, count = self._context(step, result), len(result.kept)
            kept = replay.kept[:count], replay.kept[count:]
            whole = reads == tuple(range(len(self._pool)))
            self._steps.append(CapturedStep(replay, *kept, context, asked, None if whole else reads, dead, captured))
            return result._replace(context=context)
        return result

    def _context(self, step: EagerStep, result: ForwardResult) -> CapturedContext:
        """That of an equal capture with another number of rows, whose backwards are captured together; or a new one."""
        new = CapturedContext.of(result.context, tuple([op for op in step.op.modules() if isinstance(op, Op)]))
        for context in self._contexts:
            if context == new:
                return context
        self._contexts.append(new)
        return new

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
            results = tuple(map(self._position, self._plan.results))
            self._entry.file(self._rows, CapturedCall(self._plan, tuple(self._steps), results, last))

    def _refuse(self, reason: str) -> None:
        self._refusal = self._refusal or reason

    def _position(self, slot: int) -> int:
        return slot if slot < self._values else slot + self._before - self._values
