"""The part of a call that Dynamo traces under ``torch.compile``: lists and tuples, no plan, no kernel.

Everything that a plan depends on is read here, so that Dynamo guards on it by value: the structure of the modules,
their hooks and attributes, the dtypes of the arguments, the switches. The plan itself is found outside of the trace
(:mod:`steps`). It comes back as steps without tensors; all tensors, parameters included, are arguments of the steps, so
that the compiled code serves any other layer of the same structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_scalar

from ..compiler import registry as fusion
from ..compiler.flatten import Container, opens, refuse_itself
from ..contract.config import Flags, thread_config
from ..contract.errors import ArgumentError
from ..contract.module_state import field_names, is_record
from ..contract.op import Keywords, Op, OpKwargs
from ..contract.overrides import is_hooked, outputs_of
from ..contract.spec import TensorSpec
from ..contract.torch_private import graph_break_of_torch, mark_constants_again
from ..runtime.buffers import SlotValues
from .steps import Addressed, TracedPlan, TracedStep, run_step

graph_break = graph_break_of_torch()
mark_constants_again()

Modules = list[tuple[str, nn.Module]]
_CONSTANT_TYPES = (type(None), bool, str, frozenset)  # values of switches that Dynamo need not be asked the type of


class ModuleState(NamedTuple):
    """The state that a module's results depend on; all but ``tensors`` are constants of the compiled code."""

    names: tuple[str, ...]
    tensors: list[Tensor]
    constants: tuple[object, ...]


class Values:
    """The arguments of a call, in order of arrival; a tensor that is given twice counts once."""

    def __init__(self, x: object) -> None:
        self.all: SlotValues = [x]

    def slot(self, value: object) -> int:
        if isinstance(value, Tensor):
            for i, other in enumerate(self.all):
                if other is value:
                    return i
        self.all.append(value)
        return len(self.all) - 1

    def slots(self, keywords: Keywords) -> tuple[tuple[str, int], ...]:
        return tuple([(name, self.slot(value)) for name, value in keywords.items()])


def run_container(
    container: Container, x: object, extra: tuple[object, ...], op_kwargs: OpKwargs | None, shared: Keywords
) -> object:
    """:meth:`Sequential.forward` under Dynamo."""
    modules: Modules = []
    for name, module in container._modules.items():
        _walk(module, name, modules, (container,))
    values = Values(x)
    positional = tuple([values.slot(value) for value in extra])
    addressed = None if op_kwargs is None else _addressed(modules, op_kwargs, values)
    # an op with such hooks is called as a module, and its state is read then: they may replace it before
    ops = [(label, m) for label, m in modules if isinstance(m, Op) and not m._forward_pre_hooks]
    states = {label: _module_state(op, op, "") for label, op in ops}
    plan = _find(container, states, values, (positional, addressed, values.slots(shared)))
    if plan.refusal is not None:
        graph_break(msg=plan.refusal)
        return run_eagerly(container, x, *extra, op_kwargs=op_kwargs, **shared)
    return _run(plan, modules, states, values.all)


def run_form(
    find: Callable[..., TracedPlan],
    form: tuple[object, ...],
    modules: Modules,
    states: Mapping[str, ModuleState],
    x: object,
    keywords: Keywords,
) -> Any:
    """Runs a container of which Dynamo sees the form, the non-op modules and the tensors, but no object.

    Args:
        find: returns the plan for the form, the call, the forms of its values and the names of the tensors.
        form: plain values.
        modules, states: by label.
    """
    values = Values(x)
    call = (), None, values.slots(keywords)
    arguments = tuple([_spec_or_value(value) for value in values.all])
    names = tuple([(label, state.names) for label, state in states.items()])
    version = constant_value(fusion.registry.version)
    plan: TracedPlan = find(constant_value(form), version, active_flags(), call, arguments, names)
    if plan.error is not None:
        raise ArgumentError(plan.error)
    return _run(plan, modules, states, values.all)


def run_op(op: Op, x: object, keywords: Keywords) -> object:
    """:meth:`Op.forward` under Dynamo."""
    _guard_code(op)
    values, states = Values(x), {"0": _module_state(op, op, "")}
    plan = _find(op, states, values, ((), None, values.slots(keywords)))
    if plan.refusal is not None:
        graph_break(msg=plan.refusal)
        return run_eagerly(op, x, **keywords)
    return _run(plan, [("0", op)], states, values.all)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_eagerly(module: nn.Module, *args: object, **kwargs: object) -> object:
    """Runs a call that cannot be compiled, under ``fullgraph=False``."""
    return module.forward(*args, **kwargs)


def _find(root: Any, states: Mapping[str, ModuleState], values: Values, call: object) -> TracedPlan:
    arguments = tuple([_spec_or_value(value) for value in values.all])
    names = tuple([(label, state.names) for label, state in states.items()])
    constants = (constant_value(fusion.registry.version), *[state.constants for state in states.values()])
    plan: TracedPlan = root._traced_plan(active_flags(), constants, call, arguments, names)
    if plan.error is not None:
        raise ArgumentError(plan.error)
    return plan


def active_flags() -> Flags:
    """The switches in force, by name; a record as its type and fields, as :func:`steps.switches_of` reads it."""
    config = thread_config.config
    return tuple([(name, _in_parts(getattr(config, name))) for name in field_names(type(config))])


def _in_parts(value: object) -> object:
    if isinstance(value, _CONSTANT_TYPES) or not is_record(type(value)):
        return constant_value(value)
    return (type(value), *[_in_parts(getattr(value, name)) for name in field_names(type(value))])


def _run(plan: TracedPlan, modules: Modules, states: Mapping[str, ModuleState], arguments: SlotValues) -> object:
    values = [arguments[slot] for slot in plan.inputs]
    for step in plan.steps:
        if step.handle is None:
            values.extend(_call_module(step, modules, values))
        else:
            arguments = [values[slot] for slot in step.tensors]
            for label in step.labels:
                arguments.extend(states[label].tensors)
            values.extend(run_step(step.handle, *arguments))
    return values[plan.results[0]] if len(plan.results) == 1 else tuple([values[i] for i in plan.results])


def _call_module(step: TracedStep, modules: Modules, values: SlotValues) -> tuple[object, ...]:
    """Calls a module that is not an op, or an op with hooks; Dynamo traces it, hooks included."""
    for label, module in modules:
        if label == step.labels[0]:
            x = values[step.tensors[0]]
            result = module(x.clone() if step.copies else x, **{name: values[slot] for name, slot in step.keywords})
            return outputs_of(module, step.labels[0], result) if isinstance(module, Op) else (result,)
    raise AssertionError(step.labels[0])


def _walk(module: nn.Module, label: str, modules: Modules, around: tuple[nn.Module, ...]) -> None:
    """The modules that are entries or can be addressed, with the labels of :class:`FlatContainer`."""
    modules.append((label, module))
    _guard_code(module)
    if opens(module):
        refuse_itself(module, label, around)
    if opens(module) and not is_hooked(module):
        for name, child in module._modules.items():
            _walk(child, f"{label}.{name}", modules, (*around, module))  # type: ignore[arg-type]


def _guard_code(module: nn.Module) -> None:
    """Lets Dynamo guard on the module having no code of its own: it guards where it looks up a method."""
    _ = module.forward
    if isinstance(module, Op):
        _ = module.fwd, module.bwd


def _addressed(modules: Modules, op_kwargs: OpKwargs, values: Values) -> Addressed:
    """``op_kwargs`` with places instead of modules, and slots instead of values."""
    if not isinstance(op_kwargs, Mapping):
        raise ArgumentError(f"op_kwargs must map ops to their keywords, got a {type(op_kwargs).__name__}")
    addressed = []
    for key, keywords in op_kwargs.items():
        if isinstance(key, nn.Module):
            where: tuple[object, ...] = (
                "module",
                type(key),
                tuple([label for label, module in modules if module is key]),
            )
        else:
            where = ("key", constant_value(key))
        if not isinstance(keywords, Mapping):
            raise ArgumentError(f"op_kwargs: {where[1]} got a {type(keywords).__name__}; give a mapping of keywords")
        addressed.append((where, values.slots(keywords)))
    return tuple(addressed)


def _spec_or_value(value: object) -> object:
    """The part of an argument that a plan may depend on: a tensor without shape and contents, or the value."""
    if isinstance(value, Tensor):
        return TensorSpec((0,), value.dtype, value.device, requires_grad=value.requires_grad)
    return constant_value(value)


def _module_state(root: Op, module: nn.Module, path: str) -> ModuleState:
    """The state of an op or, along a dotted path, of a module inside it."""
    attributes = root._attributes(path)
    names, tensors = (
        [path + name for name in attributes.tensors],
        [getattr(module, name) for name in attributes.tensors],
    )
    constants: list[object] = [(name, constant_value(getattr(module, name))) for name in attributes.values]
    if attributes.opaque:
        constants.append(id(module))
    for name, child in module._modules.items():
        if child is not None:
            inner = _module_state(root, child, f"{path}{name}.")
            names.extend(inner.names)
            tensors.extend(inner.tensors)
            constants.append((name, type(child), inner.constants))
    return ModuleState(tuple(names), tensors, tuple(constants))


def constant_value(value: object) -> Any:
    """Reads a value completely: Dynamo then guards on all of it, and makes no number in it dynamic."""
    if value is None or isinstance(value, (bool, str, bytes, torch.dtype, torch.device, torch.layout, Enum, type)):
        return value
    if isinstance(value, (int, float)):
        return guard_scalar(value)
    if isinstance(value, list):
        return [constant_value(v) for v in value]
    if isinstance(value, tuple):
        return tuple([constant_value(v) for v in value])
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, Mapping):
        return tuple([(constant_value(key), constant_value(v)) for key, v in value.items()])
    if is_record(type(value)):
        return tuple([constant_value(getattr(value, name)) for name in field_names(type(value))])
    raise ArgumentError(f"torch.compile: expected a tensor or a plain value, got a {type(value).__name__}")
