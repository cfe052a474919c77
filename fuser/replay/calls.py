"""Captured calls of a container: binding, plan, checks and steps are known, and only the devices have work left.

A call is replayed if an earlier one with the same :class:`CallKey` and tensors of the same form was captured. The key
holds everything that the call may depend on but the contents of tensors. All steps of its plan are ops that promise to
be replayable, so none of them looks at its arguments again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..compiler.binding import BoundArguments
from ..compiler.flatten import FlatContainer
from ..compiler.plan import Plan
from ..config import active_config
from ..parametrized import computes_parameters
from ..runtime.autograd import Runtime
from ..runtime.buffers import extent
from ..runtime.call import EagerStep, ForwardResult
from .capture import PLAIN
from .guards import NEW, SEEN, UNSUPPORTED, DynamicRows, GuardedEntry
from .program import is_replayed_for, stream_of
from .step import CapturedContext, CapturedStep, capture_step


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


def call_key(layout: FlatContainer, call: BoundArguments, runtime: Runtime) -> CallKey | None:
    """The key of a call on dense tensors of a device that nobody observes or transforms; else None."""
    if not is_replayed_for(call.values[0]) or any(layout.hooks):
        return None
    if torch._C._autograd._profiler_enabled() or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0:
        return None
    if torch._C._len_torch_dispatch_stack():  # somebody wants to see every operation: an export, a counter
        return None
    key: list[Any] = [call.reads, runtime, active_config().token]
    key += [op.edits for op in layout.ops]
    pool = [*call.values]
    for op in layout.holders:
        if op._modules and computes_parameters(op):
            return None
        pool += op.held(runtime.grad_enabled)
    for value in call.values:
        if type(value) not in PLAIN or value.layout is not torch.strided or value.is_nested:
            return None
    x = pool[0]
    return CallKey((*key, len(pool)), pool, x.shape[0] if x.dim() else 0)


class CallStep(NamedTuple):
    """A captured step of a call; all numbers are positions in the pool.

    Attributes:
        inputs: what autograd is given; nothing where it is not asked.
        given: what is launched on; None for the whole pool.
        dead: what nothing reads any more.
    """

    step: CapturedStep
    inputs: tuple[int, ...]
    given: tuple[int, ...] | None
    dead: tuple[int, ...]


class CapturedCall(NamedTuple):
    """A call that is replayed. ``last`` is what ``explain()`` needs of it, None where that depends on the rows."""

    plan: Plan
    steps: tuple[CallStep, ...]
    results: tuple[int, ...]
    last: Any

    @classmethod
    def joined(cls, several: Sequence[CapturedCall]) -> CapturedCall | None:
        """For any number of rows, from calls of different ones; None where they do not fit together."""
        first, steps = several[0], list[CallStep]()
        for same in zip(*[call.steps for call in several], strict=True):
            joined = CapturedStep.joined([each.step for each in same])
            if joined is None or any(each[1:] != same[0][1:] for each in same):
                return None
            steps.append(same[0]._replace(step=joined))
        return first._replace(steps=tuple(steps), last=None)

    def overlaps(self, pool: Sequence[Tensor], addresses: Sequence[int]) -> bool:
        """Whether a buffer may share memory with anything else, which a plan would look at more closely."""
        ends = [a + (t.nbytes if t.is_contiguous() else _reach(t)) for a, t in zip(addresses, pool, strict=True)]
        for buffer in self.plan.buffers:
            first, end = addresses[buffer.slot], ends[buffer.slot]
            if sum([a < end and first < e for a, e in zip(addresses, ends, strict=True)]) > 1:
                return True
        return False

    def run(self, pool: list[Any], addresses: list[int], rows: int) -> Any:
        """Runs on a pool, to which the steps add what they make."""
        stream = stream_of(pool[0])
        for step, inputs, read, dead in self.steps:
            if read is None:
                given, given_addresses = pool[:], addresses[:]
            else:
                given, given_addresses = [pool[i] for i in read], [addresses[i] for i in read]
            outputs = step.run(given, given_addresses, rows, stream, [pool[i] for i in inputs] if inputs else [])
            pool += outputs
            addresses += map(Tensor.data_ptr, outputs)
            for i in dead:
                pool[i] = None
        return pool[self.results[0]] if len(self.results) == 1 else tuple([pool[i] for i in self.results])


Entry = GuardedEntry[CapturedCall] | DynamicRows[CapturedCall]


def start_capture(entry: Entry, plan: Plan, key: CallKey, values: int) -> CaptureSession | None:
    """Captures a call, but not the first of its form if no other number of rows has been seen either."""
    if not isinstance(entry, GuardedEntry):
        return None  # it has a capture for any number of rows
    if not plan.is_replayable:
        entry.state = UNSUPPORTED
    elif entry.state is NEW and not entry.dynamic_rows.is_collecting:
        entry.state, entry.dynamic_rows.seen = SEEN, True
    else:
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
        self._ids = [id(t) for t in key.pool]
        self._alive: list[Any] = list(key.pool)  # so that no other tensor can have their ids
        self._steps: list[CallStep] = []
        self._refused = len(set(self._ids)) < len(self._ids)

    def run(self, step: EagerStep, inputs: Sequence[Tensor], wanted: frozenset[str]) -> ForwardResult:
        """Runs the forward of a step, and captures it."""
        result, captured = capture_step(step, inputs[0], wanted, self._contexts)
        self._add(captured, inputs if wanted else (), step.inputs(inputs[0]))
        return result

    def _add(self, step: CapturedStep | None, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        position_of = {i: position for position, i in enumerate(self._ids)}
        if step is None or any(id(t) not in position_of for t in (*inputs, *given)):
            self._refused = True
            return
        dead = tuple([self._position(slot) for slot in self._plan.steps[len(self._steps)].dead])
        asked, read = [tuple([position_of[id(t)] for t in tensors]) for tensors in (inputs, given)]
        whole = read == tuple(range(len(self._ids)))
        self._steps.append(CallStep(step, asked, None if whole else read, dead))

    def add_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Adds the outputs of the step that has run."""
        self._ids += map(id, outputs)
        self._alive += outputs

    def finish(self, last: Any) -> None:
        """Files the captured call, or that one of its steps cannot be replayed."""
        is_complete = not self._refused and len(self._steps) == len(self._plan.steps)
        results = tuple(map(self._position, self._plan.results))
        call = CapturedCall(self._plan, tuple(self._steps), results, last) if is_complete else None
        self._entry.state = call or UNSUPPORTED
        self._entry.dynamic_rows.add(self._rows, call, CapturedCall.joined)

    def _position(self, slot: int) -> int:
        return slot if slot < self._values else slot + self._before - self._values
