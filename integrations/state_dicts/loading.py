"""Foreign state dicts that ``load_state_dict`` of a container reads besides its own names.

It reads the names of torchtitan and transformers where the shapes allow one reading only, and TransformerEngine's
names. The linears themselves read one tensor for all experts or one per expert. :mod:`row_order` then brings rows of
gate and up into the order that the container reads.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ...fuser import Composite, Sequential
from ...fuser.container.sequential import StateFormat, add_state_format
from ...ops import GroupedLinear, Linear
from ...ops.basic.glu import Activated
from ...ops.parameters.grouped import ExpertParameters
from ...ops.parameters.stored import SETTLED, SUFFIX, note, noted, take_basic_ops
from . import layouts, row_order
from .layouts import Layer
from .row_order import LoadedState

_TITAN = (("w1", "w2", "w3"), ("w1_EFD", "w2_EDF", "w3_EFD"), ("w13", "w2"))
_HUGGING_FACE = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))


class _ExpertOps(NamedTuple):
    """The two linears of a container, their names in it, and the activation in between."""

    names: tuple[str, str]
    linears: tuple[GroupedLinear, GroupedLinear]
    activation: Activated


def read(container: Sequential, state: LoadedState, prefix: str, metadata: LoadedState) -> list[str]:
    """Rewrites ``state`` to our names and layout; returns the errors found."""
    experts = _experts(container)
    wrong = None if experts is None else _read_foreign(experts, state, prefix)
    if wrong is not None:
        return [wrong]
    for name, module in container.named_modules():
        if isinstance(module, Linear):
            take_basic_ops(state, f"{prefix}{name}.")
    errors = row_order.settle(container, state, prefix, metadata)
    _drop_extra_states(container, state, prefix)
    return errors


def _drop_extra_states(container: Sequential, state: LoadedState, prefix: str) -> None:
    """Drops the extra states of TransformerEngine's ops, and notes addressed to modules that do not read them."""
    children = {leaf.path for leaf in row_order.leaves(container) if leaf.parent is container}
    for name, module in container.named_modules():
        value = state.get(key := f"{prefix}{name}.{SUFFIX}")
        is_read = isinstance(module, ExpertParameters) or row_order.has_extra_state(module)
        is_note = value is SETTLED or noted(value) is not None  # for the container in which the module stands
        if not is_read and (name in children or not is_note):
            state.pop(key, None)


def _read_foreign(experts: _ExpertOps, state: LoadedState, prefix: str) -> str | None:
    if any(key.startswith(tuple(f"{prefix}{name}.weight" for name in experts.names)) for key in state):
        return None
    for form in (*_TITAN, *_HUGGING_FACE):
        if not all(isinstance(state.get(f"{prefix}{name}"), Tensor) for name in form):
            continue
        names = (*form, *(f"{name}_bias" for name in form if name.endswith("_proj")))
        part = {name: state[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in state}
        convert = layouts.from_torchtitan if form in _TITAN else partial(_from_hugging_face, experts)
        try:
            layer = layouts.converted(part, partial(convert, part))
        except ValueError as error:
            return str(error)
        for name in part:
            del state[f"{prefix}{name}"]
        _put(experts, layer, state, prefix)
        state[f"{prefix}{experts.names[0]}.{SUFFIX}"] = note(0)
        return None
    return None


def _from_hugging_face(experts: _ExpertOps, part: dict[str, Tensor]) -> Layer:
    """The layer.

    Raises:
        ValueError: the tensors do not fit, or an explicit conversion is needed; the message names it.
    """
    shapes = [tensor.shape for name, tensor in part.items() if not name.endswith("_bias")]
    expected = [(linear.num_groups, linear.out_features, linear.in_features) for linear in experts.linears]
    straight = shapes == expected
    turned = shapes == [(e, k, n) for e, n, k in expected]
    fix = "convert it with fusible.integrations.checkpoints.from_hugging_face"
    if straight and turned:
        raise ValueError(f"the matrices are square, so their orientation is ambiguous: {fix}(transposed=...)")
    if turned and experts.activation.spec.gated:
        raise ValueError(
            f"the matrices are transposed; gate and up may alternate: {fix}(transposed=True, interleaved=...)"
        )
    if not straight and not turned:
        raise ValueError(f"expected up and down of shapes {expected}")
    return layouts.from_hugging_face(part, turned, False)


def _put(experts: _ExpertOps, layer: Layer, state: LoadedState, prefix: str) -> None:
    pairs = ((layer.up, layer.up_bias), (layer.down, layer.down_bias))
    for name, linear, (weight, bias) in zip(experts.names, experts.linears, pairs, strict=True):
        state[f"{prefix}{name}.weight"] = weight.mT.contiguous() if linear.transposed_weight else weight
        if bias is not None:
            state[f"{prefix}{name}.bias"] = bias


def _experts(container: Sequential) -> _ExpertOps | None:
    """The container as experts: a grouped linear, an activation, whatever has no parameters, a grouped linear."""
    linears = {name: m for name, m in container.named_children() if isinstance(m, GroupedLinear)}
    pairs = pairwise(container.children())
    behind = [after for module, after in pairs if isinstance(module, GroupedLinear)]
    behind = [next(after.children(), after) if isinstance(after, Composite) else after for after in behind]
    first = next((module for module in behind if isinstance(module, Activated)), None)
    if len(linears) != 2 or first is None:
        return None
    (name1, fc1), (name2, fc2) = linears.items()
    return _ExpertOps((name1, name2), (fc1, fc2), first)


add_state_format(StateFormat(read, row_order.write_notes))
