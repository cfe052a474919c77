"""The routed experts of a layer under ``torch.compile``.

Every property of the module is read by value, and a container is identified by its form alone. The compiled code
therefore belongs to no single layer: layers of the same structure share it, whether compiled one by one or together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...fuser import Sequential
from ...fuser.contract.config import Flags, constant
from ...fuser.contract.overrides import is_hooked
from ...fuser.dynamo.frontend import ModuleState, constant_value, run_form
from ...fuser.dynamo.steps import TracedPlan, traced_plan_or_reason
from ...ops import Float8Block, GroupedLinear
from ...ops.formats.copies import BLOCK, SCALES
from ...ops.formats.float8 import ScaleKind
from ...ops.modules.quantize import holding
from .experts import ModuleParameters, layer_of
from .gates import GateValues, ModelExperts, activation_with, constants_read, values_of
from .stored_experts import kind_of


class QuantizedLinear(NamedTuple):
    """A weight that stays quantised, and its decode scales."""

    weight: Tensor
    scales: Tensor


class LayerForm(NamedTuple):
    """Everything that determines the container of experts.

    Attributes:
        up, down: the stored shapes of the weights.
        spec: the op between the linears, as plain values; None if the module's own code runs there.
        has_norm: whether a norm of the model follows.
        scales: the kind of scales of weights that stay quantised, see :class:`fusible.Float8Block`; None for plain
            weights.
    """

    up: tuple[int, ...]
    down: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    has_bias: bool
    is_transposed: bool
    spec: GateValues | None
    has_norm: bool
    scales: ScaleKind | None = None


def experts_forward(
    experts: ModelExperts, parameters: ModuleParameters, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts implementation while a compiler traces; see the eager one in :mod:`transformers`."""
    up, down, up_bias, down_bias = parameters
    held: list[dict[str, Tensor]] = []
    for weight, bias in ((up, up_bias), (down, down_bias)):
        held.append({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    form = tuple(up.shape), tuple(down.shape), (up.dtype, down.dtype), up_bias is not None, experts.is_transposed
    tokens = x if torch.is_autocast_enabled(x.device.type) else x.to(up.dtype)
    return _run(experts, form, held, None, tokens, top_k_index, top_k_weights).to(x.dtype)


def float8_forward(
    experts: ModelExperts, linears: Sequence[QuantizedLinear], x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """:func:`experts_forward` for experts whose weights stay quantised in blocks of 128 x 128."""
    up, down = linears
    form = *(tuple(linear.weight.shape) for linear in linears), (up.weight.dtype, down.weight.dtype), False, False
    held = [{"weight": linear.weight.detach(), SCALES: linear.scales.detach().float()} for linear in linears]
    return _run(experts, form, held, kind_of(up.scales), x, top_k_index, top_k_weights).to(x.dtype)


def _run(
    experts: ModelExperts,
    form: tuple[object, ...],
    held: list[dict[str, Tensor]],
    scales: str | None,
    tokens: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Runs the form, completed by the activation and norm of ``experts``, on the parameters ``held``."""
    spec, attributes = _spec(experts), experts.__dict__
    has_norm = bool(attributes.get("has_post_expert_norm"))
    modules: list[tuple[str, Any]] = []
    if spec is None:
        modules.append(("act", experts._apply_gate if attributes["has_gate"] else experts.act_fn))
    if has_norm:
        modules.append(("norm", experts.post_expert_norm))
    states = {name: ModuleState((), [], ()) for name in ("dispatch", "act", "scale", "combine")}
    for name, tensors in zip(("fc1", "fc2"), held, strict=True):
        states[name] = ModuleState(tuple(tensors), list(tensors.values()), ())
    call = {"top_k_index": top_k_index, "top_k_weights": top_k_weights}
    y: Tensor = run_form(_traced_plan, (*form, spec, has_norm, scales), modules, states, tokens, call)
    return y


@constant
def _traced_plan(form: tuple[Any, ...], version: object, flags: Flags, *call: object) -> TracedPlan:
    """The traced plan of a container of this form; built anew after a fusion has been registered."""
    return traced_plan_or_reason(_container(LayerForm(*form))._current, flags, *call)


@cache
def _container(form: LayerForm) -> Sequential:
    """A container without data."""
    fc1, fc2 = (_linear(form, shape, dtype) for shape, dtype in zip((form.up, form.down), form.dtypes, strict=True))
    gate = nn.Identity() if form.spec is None else activation_with(form.spec)
    norm: dict[str, nn.Module] = {"norm": nn.Identity()} if form.has_norm else {}
    return layer_of(fc1, gate, fc2, **norm)


def _linear(form: LayerForm, shape: tuple[int, ...], dtype: torch.dtype) -> GroupedLinear:
    if form.scales is not None:
        data = torch.empty(shape, dtype=dtype, device="meta")
        blocks = [shape[0], *[-(-side // BLOCK) for side in shape[1:]]]
        return holding(data, torch.empty(blocks, device="meta"), Float8Block(scales=form.scales))
    groups, *sides = shape
    turned = form.is_transposed
    features = sides if turned else sides[::-1]
    return GroupedLinear(groups, *features, bias=form.has_bias, transposed_weight=turned, device="meta", dtype=dtype)


def _spec(experts: ModelExperts) -> GateValues | None:
    """The op between the linears as plain values; None if it is the model's own code."""
    attributes = experts.__dict__  # a guard on a missing key of the dict is cheap, on a missing attribute it is not
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


def _values(attributes: dict[str, object], names: tuple[str, ...]) -> tuple[tuple[str, object], ...]:
    """The attributes among ``names`` that are numbers, text or None, as pairs of name and value."""
    present = [(name, attributes[name]) for name in names if name in attributes]
    return tuple(
        [(n, constant_value(value)) for n, value in present if value is None or isinstance(value, int | float | str)]
    )
