"""Calls that are ready: their binding, plan, checks and steps are known, and only the devices have work left.

A call is ready if one of the same :func:`facts` and form has been recorded: everything that it may depend on but what
stands in tensors. All steps of its plan are then ops that promise to be replayable, so the facts of what is given say
what each step is given, and none of them looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..compiler.binding import Call
from ..compiler.flatten import Layout
from ..compiler.plan import Plan
from ..config import active_config
from ..parametrized import computes_parameters
from ..runtime.autograd import Runtime
from ..runtime.buffers import extent
from ..runtime.call import EagerStep, ForwardResult
from .capture import PLAIN
from .program import SEEN, is_replayed_for, stream_of
from .step import REFUSED, CapturedContext, CapturedStep, capture


class Facts(NamedTuple):
    """What a call depends on besides the form of its pool: the values that it gives, then what the ops hold."""

    key: tuple[Any, ...]
    pool: list[Tensor]
    rows: int


def facts(layout: Layout, call: Call, runtime: Runtime) -> Facts | None:
    """Of a call of plain tensors alone that are on a device, and that nobody observes or transforms; else None."""
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
    return Facts((*key, len(pool)), pool, x.shape[0] if x.dim() else 0)


class ReadyStep(NamedTuple):
    """A step; all numbers are places in the pool.

    Attributes:
        inputs: what autograd is given; nothing where it is not asked.
        given: what is launched on.
        dead: what nothing reads any more.
    """

    step: CapturedStep
    inputs: tuple[int, ...]
    given: tuple[int, ...]
    dead: tuple[int, ...]


class Ready(NamedTuple):
    """A call of known facts; ``last`` is what ``explain()`` will need of it, None where that depends on the rows."""

    plan: Plan
    steps: tuple[ReadyStep, ...]
    results: tuple[int, ...]
    last: Any

    @classmethod
    def joined(cls, several: Sequence[Ready]) -> Ready | None:
        """For any number of rows, from calls of different ones; None where they do not fit together."""
        first, steps = several[0], list[ReadyStep]()
        for same in zip(*[ready.steps for ready in several], strict=True):
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
        for step, inputs, places, dead in self.steps:
            given, where = [pool[i] for i in places], [addresses[i] for i in places]
            outputs = step.run(given, where, rows, stream, [pool[i] for i in inputs])
            pool += outputs
            addresses += map(Tensor.data_ptr, outputs)
            for i in dead:
                pool[i] = None
        return pool[self.results[0]] if len(self.results) == 1 else tuple([pool[i] for i in self.results])


def watch(entry: Any, plan: Plan, facts: Facts, values: int) -> Watch | None:
    """Who shall record a call of which nothing is known: nobody where it, with any rows, is seen for the first time."""
    if not plan.is_replayable:
        entry.what = REFUSED
    elif entry.what is None and not entry.family.is_collecting:
        entry.what, entry.family.seen = SEEN, True
    else:
        return Watch(plan, facts, values, entry.family.contexts)
    return None


def _reach(tensor: Tensor) -> int:
    first, last = extent(tensor)
    return last + 1 - first


class Watch:
    """Records the steps of a call as they run."""

    def __init__(self, plan: Plan, facts: Facts, values: int, contexts: list[CapturedContext]) -> None:
        self._contexts = contexts
        self._plan, self._values, self._before, self._rows = plan, values, len(facts.pool), facts.rows
        self._ids = [id(t) for t in facts.pool]
        self._alive: list[Any] = list(facts.pool)  # so that no other tensor can have their ids
        self._steps: list[ReadyStep] = []
        self._refused = len(set(self._ids)) < len(self._ids)

    def run(self, step: EagerStep, inputs: Sequence[Tensor], wanted: frozenset[str]) -> ForwardResult:
        """Runs the forward of a step, and captures it."""
        result, captured = capture(step, inputs[0], wanted, self._contexts)
        self._add(captured, inputs if wanted else (), step.inputs(inputs[0]))
        return result

    def _add(self, step: CapturedStep | None, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        known = {i: place for place, i in enumerate(self._ids)}
        if step is None or any(id(t) not in known for t in (*inputs, *given)):
            self._refused = True
            return
        dead = [self._place(slot) for slot in self._plan.steps[len(self._steps)].dead]
        places = tuple([known[id(t)] for t in inputs]), tuple([known[id(t)] for t in given])
        self._steps.append(ReadyStep(step, *places, tuple(dead)))

    def add_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Adds the outputs of the step that has run."""
        self._ids += map(id, outputs)
        self._alive += outputs

    def note(self, entry: Any, last: Any) -> None:
        """What is known of the call from now on: how to run it again, unless one of its steps cannot."""
        ready = Ready(self._plan, tuple(self._steps), tuple(map(self._place, self._plan.results)), last)
        able = not self._refused and len(self._steps) == len(self._plan.steps)
        entry.what = ready if able else REFUSED
        entry.family.add(self._rows, ready if able else None, Ready.joined)

    def _place(self, slot: int) -> int:
        return slot if slot < self._values else slot + self._before - self._values
