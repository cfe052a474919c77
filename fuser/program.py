"""Outside of Dynamo's trace: the plan for a compiled call, as steps without their modules' tensors."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import settings
from .autograd import Runtime, accepted, run
from .binding import bind
from .errors import ArgumentError, RefusedError
from .facts import with_tensors
from .layout import Layout, Leaf
from .op import Op, Spec
from .own_code import patched_half
from .plan import Plan, Step


class TracedStep(NamedTuple):
    """One step as Dynamo reads it.

    Attributes:
        handle: names what :func:`run_step` shall run; None for a module that Dynamo is to trace itself.
        labels: the modules whose tensors are passed, or the module to trace.
        tensors: the slots of x and of the tensors among the keywords.
        keywords: of a module to trace: (keyword, slot).
        outputs: how many it gives.
    """

    handle: str | None
    labels: tuple[str, ...]
    tensors: tuple[int, ...]
    keywords: tuple[tuple[str, int], ...]
    outputs: int


class Program(NamedTuple):
    """A plan as Dynamo reads it.

    Attributes:
        inputs: which argument stands in each of the first slots.
        steps, results: as a plan's.
        refusal: why it must run eagerly; error: why it cannot run at all.
    """

    inputs: tuple[int, ...] = ()
    steps: tuple[TracedStep, ...] = ()
    results: tuple[int, ...] = ()
    refusal: str | None = None
    error: str | None = None


class _Refused(Exception):
    """Why a step must run eagerly."""


@dataclass(frozen=True)
class Prepared:
    """A step whose tensors, those of its modules included, are still to come.

    Attributes:
        step: its module, and the ops of its leaves, have no tensors.
        roles: of each leaf, which part of a fused op it is; "" for the op itself.
        slots: of x and of the tensors among the keywords, in the order in which they come.
        names: of the modules' tensors, which come next.
        given: slot -> value, of the keywords that are no tensors.
    """

    step: Step
    roles: tuple[str, ...]
    slots: tuple[int, ...]
    names: tuple[str, ...]
    given: Mapping[int, Any]
    runtime: Runtime
    config: settings.Config

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Checks and runs the step with these tensors."""
        arguments, own = tensors[: len(self.slots)], tensors[len(self.slots) :]
        values = {**self.given, **dict(zip(self.slots, arguments, strict=True))}
        op: Op = with_tensors(self.step.module, dict(zip(self.names, own, strict=True)))
        parts: Any = tuple([op if role == "" else op._modules[role] for role in self.roles])
        x = values[self.step.x]
        with settings.using(self.config):
            replace(self.step, ops=parts).check(Spec.of(x), values, self.runtime)  # type: ignore[arg-type]
            keywords = {name: values[slot] for name, slot in self.step.reads}
            return run(op, x, keywords, self.runtime, self.step.input_names)


_prepared: weakref.WeakValueDictionary[str, Prepared] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _keep(handle: str, prepared: Prepared) -> None:
    """Files a step for as long as the code lives that Dynamo is about to compile: as one of its globals."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    _prepared[handle] = prepared
    InstructionTranslator.current_tx().output.install_global("__fusible_step", prepared)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def run_step(handle: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What Dynamo puts into its graph for a step: AOTAutograd traces through it, down to the kernels' custom ops."""
    return _prepared[handle].run(tensors)


def answer(find: Callable[..., Program], switches: tuple[Any, ...], *arguments: Any) -> Program:
    """A program, or one that says why there is none: Dynamo would bury an exception."""
    try:
        with settings.using(settings.config_of(**dict(switches))):  # as the traced code has them
            return find(*arguments)
    except _Refused as refused:
        return Program(refusal=str(refused))
    except (ArgumentError, IndexError, RefusedError) as error:
        return Program(error=str(error))


def of_container(container: Any, call: Any, likes: Any, names: Any) -> Program:
    """The program of a ``Sequential`` for a call; :mod:`compiled` says what the arguments are."""
    extra, addressed, shared = call
    compiled, values = container._current(), [_stand_in(like) for like in likes]
    layout, runtime = compiled.layout, Runtime.of(values[0])
    op_kwargs = None if addressed is None else {_key(layout, where): _given(kw, values) for where, kw in addressed}
    bound = bind(layout, values[0], tuple([values[slot] for slot in extra]), op_kwargs, _given(shared, values))
    plan: Plan = compiled.plan(bound, runtime)
    return _program(plan.steps, plan.results, bound.values, values, dict(names), runtime)


def of_op(op: Op, call: Any, likes: Any, names: Any) -> Program:
    """The program of an op alone."""
    values = [_stand_in(like) for like in likes]
    runtime, given = Runtime.of(values[0]), accepted(op, _given(call[2], values))
    reads = tuple([(name, slot) for slot, name in enumerate(given, 1)])
    outputs = tuple(range(1 + len(given), 2 + len(given) + len(op.extra_outputs)))
    step = Step(op, (Leaf("", 0, op),), (op,), (reads,), reads, 0, outputs, op.input_names(), False, False)
    return _program((step,), outputs, [values[0], *given.values()], values, dict(names), runtime)


def _program(
    steps: tuple[Step, ...],
    results: tuple[int, ...],
    bound: list[Any],
    values: list[Any],
    names: Mapping[str, tuple[str, ...]],
    runtime: Runtime,
) -> Program:
    """Prepares the steps. ``bound`` are those of ``values`` that the steps read, in the order of the slots."""
    places = {id(value): place for place, value in enumerate(values)}
    traced = [_traced(step, bound, names, runtime) for step in steps]
    return Program(tuple([places[id(value)] for value in bound]), tuple(traced), results)


def _traced(step: Step, bound: list[Any], names: Mapping[str, tuple[str, ...]], runtime: Runtime) -> TracedStep:
    labels = tuple([leaf.label for leaf in step.leaves])
    if step.input_names is None or not isinstance(step.module, Op):
        return TracedStep(None, labels, (step.x,), step.reads, len(step.outputs))
    _check_traceable(step, runtime)
    given = {slot: bound[slot] for _, slot in step.reads if slot < len(bound) and not isinstance(bound[slot], Tensor)}
    slots = tuple(dict.fromkeys([step.x, *[slot for _, slot in step.reads if slot not in given]]))
    roles = _roles(step)
    dotted = tuple([f"{r}.{n}" if r else n for r, label in zip(roles, labels, strict=True) for n in names[label]])
    bare = replace(step, module=with_tensors(step.module, {}), ops=(None,) * len(step.ops))
    handle = f"step {next(_numbers)}: {step.name}"
    _keep(handle, Prepared(bare, roles, slots, dotted, given, runtime, settings.current()))
    return TracedStep(handle, labels, slots, (), len(step.outputs))


def _check_traceable(step: Step, runtime: Runtime) -> None:
    for leaf, op in zip(step.leaves, step.ops, strict=True):
        if op and (half := patched_half(op)):
            raise _Refused(f"{leaf}: its {half} was set on the object, whose tensors compiled code does not see")
        why = op.trace_refusal() if op and runtime.grad_enabled else None
        if why:
            raise _Refused(f"{leaf}: {why}")


def _roles(step: Step) -> tuple[str, ...]:
    """Of each leaf of a step, the role of its op in the fused op."""
    if step.ops[0] is step.module:
        return ("",)
    parts = dict(step.module._modules)
    found = []
    for op in step.ops:
        found.append(next(role for role, part in parts.items() if part is op))
        del parts[found[-1]]  # an op may stand at two places
    return tuple(found)


def _key(layout: Layout, where: Any) -> Any:
    """A key of ``op_kwargs`` again, from where the traced code found it."""
    if where[0] == "key":
        return where[1]
    _, cls, labels = where
    return layout.module_at(labels[0]) if labels else cls.__new__(cls)


def _given(slots: Any, values: list[Any]) -> dict[str, Any]:
    return {name: values[slot] for name, slot in slots}


def _stand_in(like: Any) -> Any:
    """An argument without data: all that binding and plans ask of one."""
    kind, *what = like
    return _StandIn(*what) if kind == "tensor" else what[0]


class _StandIn(Tensor):
    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> _StandIn:
        return Tensor._make_wrapper_subclass(cls, (0,), dtype=dtype, device=device, requires_grad=requires_grad)

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} of a tensor without data")
