"""Outside of Dynamo's trace: the plan for a compiled call, as steps without their modules' tensors."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..compiler.binding import BoundArguments, bind
from ..compiler.flatten import FlatContainer
from ..compiler.plan import Plan
from ..compiler.step import KeywordSlots, Step
from ..contract.config import Config, Flags, active_config, config_of, use_config
from ..contract.errors import ArgumentError, RefusedError
from ..contract.module_state import with_tensors
from ..contract.op import Op
from ..contract.overrides import patched_half
from ..contract.parametrized import foreseen
from ..contract.spec import TensorSpec
from ..contract.torch_private import keep_with_compiled_code
from ..contract.tracing import Outline
from ..runtime.autograd import Runtime, run
from ..runtime.buffers import SlotValues, works_in_place

Addressed = tuple[tuple[tuple[object, ...], KeywordSlots], ...]
"""``op_kwargs`` with places instead of modules, and slots instead of values."""


class TracedStep(NamedTuple):
    """One step as Dynamo reads it.

    Attributes:
        handle: the name of the step for :func:`run_step`; None for a module that Dynamo traces itself.
        labels: the modules whose tensors are passed, or the module to trace.
        tensors: the slots of x and of the tensors among the keywords.
        keywords: for a module to trace, its (keyword, slot).
        copies: whether a module to trace gets a copy of x, since it works in place.
    """

    handle: str | None
    labels: tuple[str, ...]
    tensors: tuple[int, ...]
    keywords: tuple[tuple[str, int], ...]
    copies: bool = False


class TracedPlan(NamedTuple):
    """A plan as Dynamo reads it.

    Attributes:
        inputs: the argument in each of the first slots.
        steps, results: as a plan's.
        refusal: the reason why it must run eagerly; error: the reason why it cannot run at all.
    """

    inputs: tuple[int, ...] = ()
    steps: tuple[TracedStep, ...] = ()
    results: tuple[int, ...] = ()
    refusal: str | None = None
    error: str | None = None


class Compiled(Protocol):
    """The state of a container between calls."""

    layout: FlatContainer

    def plan(self, call: BoundArguments, runtime: Runtime) -> Plan:
        """The plan for the signature of a call."""


class _Refused(Exception):
    """The reason why a step must run eagerly."""


@dataclass(frozen=True)
class LoweredStep:
    """A step that gets its tensors, including those of its modules, at the call.

    Attributes:
        step: the step; its module and ops have no tensors.
        slots: the slots of x and of tensor keywords, in order.
        names: the names of the modules' tensors, which follow.
        constants: slot -> value, for keywords that are not tensors.
    """

    step: Step
    slots: tuple[int, ...]
    names: tuple[str, ...]
    constants: Mapping[int, object]
    runtime: Runtime
    config: Config

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Checks and runs the step with these tensors."""
        arguments, module_tensors = tensors[: len(self.slots)], tensors[len(self.slots) :]
        by_slot = {**self.constants, **dict(zip(self.slots, arguments, strict=True))}
        values: SlotValues = [by_slot.get(slot) for slot in range(max(by_slot) + 1)]
        op = with_tensors(self.step.module, dict(zip(self.names, module_tensors, strict=True)))
        assert isinstance(op, Op)
        step = self.step.with_op(op)
        x = values[step.x]
        with use_config(self.config):
            step = step.computed() if step.has_parametrized_inputs else step
            step.check(TensorSpec.of(x), values, self.runtime, {})
            keywords = {name: values[slot] for name, slot in step.reads}
            return run(step.module, x, keywords, self.runtime, step.input_names, None, step.x_is_inner)  # type: ignore[arg-type]


_lowered: weakref.WeakValueDictionary[str, LoweredStep] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def run_step(handle: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The function in Dynamo's graph for a step. AOTAutograd traces through it, down to the kernels' custom ops."""
    return _lowered[handle].run(tensors)


def traced_plan_or_reason(current: Callable[[], Compiled], flags: Flags, *call: Any) -> TracedPlan:
    """A traced plan, or one with the reason why there is none, as Dynamo would hide an exception."""
    try:
        with use_config(switches_of(flags)):  # as the traced code has them
            return _plan_of_call(current(), *call)
    except _Refused as refused:
        return TracedPlan(refusal=str(refused))
    except (ArgumentError, IndexError, RefusedError) as error:
        return TracedPlan(error=str(error))


def switches_of(flags: Flags) -> Config:
    """The inverse of :func:`frontend.active_flags`."""
    return config_of(**{name: _whole(value) for name, value in flags})


def _whole(value: object) -> object:
    """A record from its type and its fields."""
    if not isinstance(value, tuple):
        return value
    kind, *fields = value
    return kind(*map(_whole, fields))


def _plan_of_call(
    compiled: Compiled,
    call: tuple[tuple[int, ...], Addressed | None, KeywordSlots],
    arguments: tuple[object, ...],
    names: tuple[tuple[str, tuple[str, ...]], ...],
) -> TracedPlan:
    """The traced plan for a call with the state ``compiled``; :mod:`frontend` describes the other arguments."""
    (extra, addressed, shared), values = call, [_outline(each) for each in arguments]
    layout, runtime = compiled.layout, Runtime.of(values[0])
    op_kwargs = None if addressed is None else {_key(layout, where): _by_name(kw, values) for where, kw in addressed}
    bound = bind(layout, values[0], tuple([values[slot] for slot in extra]), op_kwargs, _by_name(shared, values))
    plan = compiled.plan(bound, runtime)
    return _traced_plan(plan.steps, plan.results, bound.values, values, dict(names), runtime)


def _traced_plan(
    steps: tuple[Step, ...],
    results: tuple[int, ...],
    bound: SlotValues,
    values: SlotValues,
    names: Mapping[str, tuple[str, ...]],
    runtime: Runtime,
) -> TracedPlan:
    """Prepares the steps. ``bound``: the ``values`` that the steps read, in the order of slots."""
    positions = {id(value): position for position, value in enumerate(values)}
    traced = [_traced(step, bound, names, runtime) for step in steps]
    return TracedPlan(tuple([positions[id(value)] for value in bound]), tuple(traced), results)


def _traced(step: Step, bound: SlotValues, names: Mapping[str, tuple[str, ...]], runtime: Runtime) -> TracedStep:
    labels = tuple([entry.label for entry in step.entries])
    if step.input_names is None or not isinstance(step.module, Op):
        return TracedStep(None, labels, (step.x,), step.reads, bool(step.beside) and works_in_place(step.module))
    _check_traceable(step, runtime)
    constants = {
        slot: bound[slot] for _, slot in step.reads if slot < len(bound) and not isinstance(bound[slot], Tensor)
    }
    slots = tuple(dict.fromkeys([step.x, *[slot for _, slot in step.reads if slot not in constants]]))
    by_role = zip(step.roles, labels, strict=True)
    dotted = tuple([f"{role}.{name}" if role else name for role, label in by_role for name in names[label]])
    bare = replace(step, module=with_tensors(step.module, {}), ops=(None,) * len(step.ops))
    handle = f"step {next(_numbers)}: {step.name}"
    lowered = _lowered[handle] = LoweredStep(bare, slots, dotted, constants, runtime, active_config())
    keep_with_compiled_code("__fusible_step", lowered)
    return TracedStep(handle, labels, slots, ())


def _check_traceable(step: Step, runtime: Runtime) -> None:
    for entry, op in zip(step.entries, step.ops, strict=True):
        if op and (method := patched_half(op)):
            raise _Refused(f"{entry}: its {method} was set on the object, whose tensors compiled code does not see")
        why = op.promises.eager_only if op else None
        if op and why is None and runtime.grad_enabled:
            why = foreseen(op).trace_refusal()
        if why:
            raise _Refused(f"{entry}: {why}")


def _key(layout: FlatContainer, where: tuple[Any, ...]) -> object:
    """The key of ``op_kwargs`` for a place that the traced code found."""
    if where[0] == "key":
        return where[1]
    _, cls, labels = where
    return layout.module_at(labels[0]) if labels else cls.__new__(cls)


def _by_name(slots: KeywordSlots, values: SlotValues) -> dict[str, object]:
    return {name: values[slot] for name, slot in slots}


def _outline(argument: object) -> object:
    """An argument without data, which suffices for binding and plans."""
    return Outline(argument, "a plan reads no values") if isinstance(argument, TensorSpec) else argument
