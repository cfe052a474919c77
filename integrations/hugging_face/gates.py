"""The activation of a transformers model's experts, traced from the module's own function as a program.

A program equal to a built-in activation becomes that activation, whose kernels are compiled ahead. Any other program is
compiled at its first run. A function that cannot be traced runs as it is, between two grouped linears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from torch import Tensor, nn

from ...fuser.contract.config import constant
from ...fuser.contract.overrides import is_hooked
from ...ops.basic.glu import Activated
from ...ops.basic.recognition import recognized
from ...ops.programs.packed import PackedProgram, trace_packed
from ...ops.programs.program import parse
from ...ops.programs.tracing import trace
from ...ops.values.activation_spec import ActivationSpec, spec_of_program

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GateValues = tuple[Any, ...]
"""The values of an :class:`ActivationSpec`, in types that compiled code can hold."""
_UNCHANGING = type(None), int, float, str, FunctionType, BuiltinFunctionType, partial


M = TypeVar("M")


class ModelExperts(nn.Module):
    """An experts module of transformers: the attributes that are read here. A type alone, never an object."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: nn.Module
    config: PreTrainedConfig
    _apply_gate: Callable[[Tensor], Tensor]


def is_experts(module: nn.Module) -> TypeGuard[ModelExperts]:
    """Whether a module has the attributes that transformers gives to experts modules, whose forward it wraps."""
    forward = getattr(type(module), "forward", None)
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(forward, "__wrapped__")


class ModelActivation(Activated):
    """The activation or the gate of a model, as it was read."""


def activation_of(experts: ModelExperts) -> tuple[ModelActivation | None, str]:
    """The op that replaces the code between the two linears, or None and the reason why that code must run as it is."""
    act = getattr(experts, "act_fn", None)
    if "_apply_gate" in vars(experts) or (isinstance(act, nn.Module) and any(map(is_hooked, act.modules()))):
        return None, "this module's _apply_gate was replaced, or its act_fn has hooks"
    if (name := _unwatched(experts)) is not None:
        return None, f"its gate reads {name}, which may change"
    try:
        return ModelActivation(_spec(experts)), ""
    except Exception as error:  # a model's code may raise anything where it is tried out
        return None, str(error)


def names_read(kind: type, method: object) -> tuple[str, ...]:
    """All names that a method uses, and the methods of the class that it calls; attributes are among them."""
    names, asked = dict[str, None](), [method]
    while asked:
        new = [name for name in _names_in(getattr(asked.pop(), "__code__", None)) if name not in names]
        names.update(dict.fromkeys(new))
        asked += [vars(base).get(name) for name in new for base in kind.__mro__ if base is not nn.Module]
    return tuple(names)


@constant
def constants_read(kind: type, gate: object, act: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The attribute names that the gate of experts may read, and those that an activation of class ``act`` may read."""
    return names_read(kind, gate), names_read(act, getattr(act, "forward", None)) if isinstance(act, type) else ()


@constant
def values_of(
    kind: type[ModelExperts],
    gate: object,
    has_gate: bool,
    constants: tuple[tuple[str, object], ...],
    act: object,
    act_constants: tuple[tuple[str, object], ...],
) -> GateValues | None:
    """The spec that :func:`activation_of` finds for experts with these values, or None.

    Args:
        kind, gate: the class of the experts, and its ``_apply_gate``.
        has_gate, constants: their attributes that exist, by name.
        act: their activation: a function, the class of a module, or None.
        act_constants: the attributes of that module.
    """
    if getattr(kind, "_apply_gate", None) is not gate:
        return None
    if isinstance(act, type):
        try:
            act = _with(_module(act), act_constants)
        except TypeError:
            return None
    like = object.__new__(kind)
    nn.Module.__init__(like)
    op = activation_of(_with(like, (("has_gate", has_gate), ("act_fn", act), *constants)))[0]
    if op is None:
        return None
    *values, program = [getattr(op.spec, field.name) for field in fields(op.spec)]
    return *values, program and program.text


def activation_with(values: GateValues) -> ModelActivation:
    """The inverse of :func:`values_of`."""
    *others, text = values
    return ModelActivation(ActivationSpec(*[*others, text and parse(text)]))


def _module(kind: type) -> object:
    """An instance of the class, if an activation has no state besides plain values.

    Raises:
        TypeError: it may have other state.
    """
    if not kind.__module__.startswith(("torch.nn.", "transformers.")):
        raise TypeError(f"{kind.__name__} may hold anything")
    return kind()


def _with(module: M, constants: tuple[tuple[str, object], ...]) -> M:
    for name, value in constants:
        setattr(module, name, value)
    return module


def _spec(experts: ModelExperts) -> ActivationSpec:
    if getattr(experts, "has_gate", True):
        program, block = trace_packed(experts._apply_gate)
    else:
        program, block = PackedProgram(trace(experts.act_fn, ("x",)), None)
    built_in = recognized(program)
    return spec_of_program(program, block) if built_in is None else replace(built_in, block=block)


def _unwatched(experts: ModelExperts) -> str | None:
    """An attribute that the gate or activation reads and that may change unnoticed: no number, no function."""
    act, gate = getattr(experts, "act_fn", None), getattr(type(experts), "_apply_gate", None)
    modules = [*act.modules()] if isinstance(act, nn.Module) else []
    reads = [(experts, names_read(type(experts), gate)), *[(m, names_read(type(m), type(m).forward)) for m in modules]]
    for module, names in reads:
        children = {name for name, child in module._modules.items() if child not in modules}
        registered = {*module._parameters, *module._buffers, *children}
        for name in names:
            if name in registered or not isinstance(vars(module).get(name), _UNCHANGING):
                return name
    return None


def _names_in(code: CodeType | None) -> Iterator[str]:
    if code is None:
        return
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
