"""The routed experts of a layer in code that is being compiled.

Everything is read off the module by value, and the container is known by its form alone, so that nothing in the code
belongs to one layer: layers of one structure share it, compiled one by one or all at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..fuser import Sequential
from ..fuser.config import constant
from ..fuser.dynamo.frontend import Modules, ModuleState, constant_value, run_form
from ..fuser.dynamo.steps import Program, program_or_reason
from ..fuser.overrides import is_hooked
from ..ops import GroupedLinear
from .experts import Parameters, layer_of
from .gates import activation_with, constants_read, values_of


class LayerForm(NamedTuple):
    """What the container of experts depends on.

    Attributes:
        up, down: the shapes of the weights as they are stored.
        spec: of the op between the linears, as plain values; None where the module's own code runs there.
        has_norm: whether a norm of the model's own follows.
    """

    up: tuple[int, ...]
    down: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    has_bias: bool
    is_transposed: bool
    spec: tuple[Any, ...] | None
    has_norm: bool


def experts_forward(
    experts: Any, parameters: Parameters, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts implementation where a compiler traces; see the one of :mod:`transformers`."""
    up, down, up_bias, down_bias = parameters
    spec, attributes = _spec(experts), experts.__dict__
    has_norm = bool(attributes.get("has_post_expert_norm"))
    modules: Modules = []
    if spec is None:
        modules.append(("act", experts._apply_gate if attributes["has_gate"] else experts.act_fn))
    if has_norm:
        modules.append(("norm", experts.post_expert_norm))
    form = tuple(up.shape), tuple(down.shape), (up.dtype, down.dtype), up_bias is not None, experts.is_transposed
    states = {name: ModuleState((), [], ()) for name in ("dispatch", "act", "scale", "combine")}
    for name, weight, bias in (("fc1", up, up_bias), ("fc2", down, down_bias)):
        held = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        states[name] = ModuleState(tuple(held), list(held.values()), ())
    tokens = x if torch.is_autocast_enabled(x.device.type) else x.to(up.dtype)
    call = {"top_k_index": top_k_index, "top_k_weights": top_k_weights}
    y: Tensor = run_form(_program, (*form, spec, has_norm), modules, states, tokens, call)
    return y.to(x.dtype)


@constant
def _program(form: Any, call: Any, arguments: Any, names: Any, flags: Any, version: Any) -> Program:
    """The program of the container of that form; a new one where fusions have been registered since."""
    return program_or_reason(_container(LayerForm(*form))._current, flags, call, arguments, names)


@cache
def _container(form: LayerForm) -> Sequential:
    """A container without data."""
    fc1, fc2 = (_linear(form, shape, dtype) for shape, dtype in zip((form.up, form.down), form.dtypes, strict=True))
    norm: dict[str, nn.Module] = {"norm": nn.Identity()} if form.has_norm else {}
    return layer_of(fc1, _between(form.spec), fc2, **norm)


def _linear(form: LayerForm, shape: tuple[int, ...], dtype: torch.dtype) -> GroupedLinear:
    groups, *sides = shape
    options: dict[str, Any] = {"bias": form.has_bias, "transposed_weight": form.is_transposed}
    return GroupedLinear(groups, *(sides if form.is_transposed else sides[::-1]), device="meta", dtype=dtype, **options)


def _between(spec: tuple[Any, ...] | None) -> nn.Module:
    """The op of a spec; in the place of the module's own code, a module that is no op."""
    if spec is None:
        return nn.Identity()
    return activation_with(spec)


def _spec(experts: Any) -> tuple[Any, ...] | None:
    """What is between the linears, as plain values; None if that is the model's own code."""
    attributes = experts.__dict__  # to guard on what is not in it is cheap, on a missing attribute it is not
    if "_apply_gate" in attributes:
        return None
    act, of_module = attributes["_modules"].get("act_fn"), {}
    if act is None:
        act = attributes.get("act_fn")
    elif is_hooked(act):
        return None
    else:
        of_module, act = act.__dict__, type(act)
    kind = type(experts)
    gate = getattr(kind, "_apply_gate", None)
    of_gate, of_act = constants_read(kind, gate, act)
    constants, act_constants = _values(attributes, of_gate), _values(of_module, of_act)
    return values_of(kind, gate, attributes["has_gate"], constants, act, act_constants)


def _values(attributes: dict[str, Any], names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """Those of the attributes that are numbers or text."""
    values = [(name, attributes.get(name)) for name in names]
    return tuple([(name, constant_value(value)) for name, value in values if isinstance(value, int | float | str)])
