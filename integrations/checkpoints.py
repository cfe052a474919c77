"""Conversions of other libraries' checkpoints to ours and back, as functions from state dict to state dict.

Each converts the experts of every layer that it finds, and does not change other entries. ``names`` are the names of
the two linears in the container: ``("0", "3")`` for ``Sequential(fc1, SwiGLU(), Scale(), fc2)``. Properties that a
layout does not state are arguments and never guessed: whether matrices are transposed, whether gate and up alternate.

``load_state_dict`` of a container reads these formats directly unless they are ambiguous; see :mod:`loading`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from ..ops.formats.copies import SCALES
from ..ops.parameters.stored import SUFFIX, note
from ..ops.values.activation_spec import Interleaved, gated
from .state_dicts import layouts, row_order
from .state_dicts.layouts import Layer

StateDict = Mapping[str, Any]
LinearNames = tuple[str, str]
T = TypeVar("T")

_HUGGING_FACE = r"(?P<layer>(.*\.)?)(?P<name>(gate_up|up|down)_proj(_bias)?)$"
_ONE_BY_ONE = r"(.*\.)?experts\.\d+\.((gate|up|down)_proj|w[123])\.weight$"
_MXFP4 = r"(?P<layer>(.*\.)?)(?P<name>(gate_up|down)_proj_(blocks|scales|bias))$"
_TORCHTITAN = r"(?P<layer>(.*\.)?)(?P<name>(w1|w2|w3|w13)(_[A-Z0-9]+)?)$"


def from_hugging_face(
    state: StateDict, names: LinearNames, *, transposed: bool = False, interleaved: bool = False
) -> dict[str, object]:
    """Converts transformers' experts: ``gate_up_proj`` (or ``up_proj``), ``down_proj`` and their biases.

    Args:
        transposed: matrices are [E, in, out], as in gpt-oss.
        interleaved: gate and up columns alternate, as in gpt-oss.

    Raises:
        ValueError: tensors are missing or do not fit, or each expert has its own tensor, as in published files.
    """
    one = next((key for key in state if re.match(_ONE_BY_ONE, key)), None)
    if one is not None:
        raise ValueError(
            f"{one} holds one expert, but the experts of a layer must be one tensor, such as gate_up_proj; "
            "transformers stacks them when it loads: give the state_dict() of its model"
        )
    return _convert(state, _HUGGING_FACE, names, lambda part: layouts.from_hugging_face(part, transposed, interleaved))


def to_hugging_face(
    state: StateDict, names: LinearNames, *, gated: bool = True, transposed: bool = False, interleaved: bool = False
) -> dict[str, object]:
    """The inverse of :func:`from_hugging_face`; ``gated`` says how the first matrix is called.

    Raises:
        ValueError: tensors do not fit; or rows may be gate and up, and the state dict does not say in which order, as a
            dictionary of ``named_parameters()``: :func:`with_layout` says it.
    """
    return _convert_back(state, names, lambda layer: layouts.to_hugging_face(layer, gated, transposed, interleaved))


def from_mxfp4(state: StateDict, names: LinearNames, *, interleaved: bool = True) -> dict[str, object]:
    """Converts gpt-oss's checkpoints: blocks, scales and biases of ``gate_up_proj`` and ``down_proj``.

    Nothing is rounded. A container quantised with ``quantize_(container, MXFP4())`` loads the bytes unchanged; a 16-bit
    container loads the dequantised values, with a warning.

    Args:
        interleaved: gate and up rows alternate, as in gpt-oss.
    """
    _check_names(names)
    rest = dict(state)
    for prefix, part in _packed_layers(state).items():
        for name in part:
            del rest[f"{prefix}{name}"]
        packed = _converted(prefix, part, partial(layouts.from_mxfp4, part, interleaved))
        rest |= _ours(packed.layer, prefix, names)
        rest |= {f"{prefix}{names[0]}.{SCALES}": packed.up_scales, f"{prefix}{names[1]}.{SCALES}": packed.down_scales}
    return rest


def _packed_layers(state: StateDict) -> dict[str, dict[str, Tensor]]:
    """The tensors of each layer in MXFP4, by prefix.

    Layers with biases alone are left out: their format is another one.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for key in state:
        if (match := re.match(_MXFP4, key)) and isinstance(state[key], Tensor):
            layers.setdefault(match["layer"], {})[match["name"]] = state[key]
    return {prefix: part for prefix, part in layers.items() if any(not name.endswith("_bias") for name in part)}


def from_torchtitan(state: StateDict, names: LinearNames) -> dict[str, object]:
    """Converts torchtitan's experts: ``w1``, ``w2``, ``w3`` or ``w13``, ``w2``, with or without shape suffixes."""
    return _convert(state, _TORCHTITAN, names, layouts.from_torchtitan)


def to_torchtitan(state: StateDict, names: LinearNames) -> dict[str, object]:
    """Converts to torchtitan's ``w1``, ``w2``, ``w3``.

    Raises:
        ValueError: the experts have biases.
    """
    return _convert_back(state, names, layouts.to_torchtitan)


def from_transformer_engine(
    state: StateDict, names: LinearNames, *, te_names: LinearNames = ("0", "2"), glu_interleave_size: int | None = None
) -> dict[str, object]:
    """Converts the grouped linears of a ``transformer_engine.pytorch.ops.Sequential``.

    Args:
        te_names: the names of the two linears in that container.
        glu_interleave_size: the argument of its activation: rows of gate and up alternate in blocks of this size.
    """
    _check_names(names)
    _check_names(te_names)
    rest = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    for prefix, (up, down) in _pairs(rest, te_names, numbered=True):
        stored = zip(te_names, (up, down), strict=True)
        part = {f"{name}.{key}": tensor for name, tensors in stored for key, tensor in tensors.items()}
        layer = _converted(prefix, part, partial(layouts.from_transformer_engine, up, down, glu_interleave_size))
        for name, part in zip(te_names, (up, down), strict=True):
            for key in part:
                del rest[f"{prefix}{name}.{key}"]
        rest |= _ours(layer, prefix, names)
    return rest


def to_transformer_engine(
    state: StateDict, names: LinearNames, *, te_names: LinearNames = ("0", "2"), glu_interleave_size: int | None = None
) -> dict[str, object]:
    """The inverse of :func:`from_transformer_engine`."""
    _check_names(te_names)

    def convert(layer: Layer) -> dict[str, Tensor]:
        parts = layouts.to_transformer_engine(layer, glu_interleave_size)
        named = zip(te_names, parts, strict=True)
        return {f"{name}.{key}": tensor for name, part in named for key, tensor in part.items()}

    return _convert_back(state, names, convert)


def with_layout(state: StateDict, name: str, layout: str | Interleaved) -> dict[str, object]:
    """Returns the state dict with a note on the order of gate and up rows of the linear before a GLU.

    A container reorders rows by this note on loading. Its own ``state_dict()`` and the conversions here write it.

    Args:
        name: the linear's name in its layer (every layer that has one is noted), or its full name.
        layout: the GLU's layout: ``"concat"``, gate before up, or ``interleaved(n)``.
    """
    pattern = rf"(?P<linear>(.*\.)?{re.escape(name)}\.)(basic_ops\.\d+\.)?[^.]+$"
    block = gated("silu", None, 1.0, 0.0, layout).block or 0
    linears = {match["linear"] for key in state if (match := re.match(pattern, key))}
    if not linears:
        raise ValueError(f"with_layout: the state dict has no parameter of {name!r}")
    return {**state, **{f"{linear}{SUFFIX}": note(block) for linear in linears}}


def _convert(
    state: StateDict, pattern: str, names: LinearNames, convert: Callable[[Mapping[str, Tensor]], Layer]
) -> dict[str, object]:
    _check_names(names)
    rest, layers = dict(state), dict[str, dict[str, Tensor]]()
    for key in state:
        match = re.match(pattern, key)
        if match and isinstance(state[key], Tensor) and state[key].dim() >= 2 + (not key.endswith("_bias")):
            layers.setdefault(match["layer"], {})[match["name"]] = rest.pop(key)
    for prefix, part in layers.items():
        rest |= _ours(_converted(prefix, part, partial(convert, part)), prefix, names)
    return rest


def _converted(prefix: str, part: layouts.Part, conversion: Callable[[], T]) -> T:
    try:
        return layouts.converted(part, conversion)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _convert_back(
    state: StateDict, names: LinearNames, convert: Callable[[Layer], dict[str, Tensor]]
) -> dict[str, object]:
    _check_names(names)
    rest = dict(state)
    for prefix, (up, down) in _pairs(state, names, numbered=False):
        for name, part in zip(names, (up, down), strict=True):
            for key in part:
                del rest[f"{prefix}{name}.{key}"]
        first, block = f"{prefix}{names[0]}", row_order.stated_order(state, f"{prefix}{names[0]}")
        layer = layouts.concat(Layer(up["weight"], down["weight"], up.get("bias"), down.get("bias")), block)
        rest |= {f"{prefix}{name}": tensor for name, tensor in convert(layer).items()}
        if block is None and layer.up.shape[1] == 2 * layer.down.shape[2]:
            why = row_order.untold(f"{first}.weight", "in blocks")
            raise ValueError(f"{why}: say it with {row_order.fix(f'{first}.')}")
        if block and isinstance(factor := rest.get(f"{first}.lora_b"), Tensor):
            rest[f"{first}.lora_b"] = layouts.deinterleave(factor, block, -2)
        rest.pop(f"{first}.{SUFFIX}", None)
    return rest


def _check_names(names: object) -> None:
    """Raises for anything but two names; the letters of one would name two linears."""
    is_pair = isinstance(names, (tuple, list)) and len(names) == 2 and names[0] != names[1]
    if not is_pair or not all(isinstance(name, str) for name in names):  # type: ignore[attr-defined]
        raise ValueError(f"checkpoints: names of two linears expected, such as ('up', 'down'), got {names!r}")


def _pairs(
    state: StateDict, names: LinearNames, numbered: bool
) -> Iterator[tuple[str, tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    """Yields each prefix that has both linears, with the parameters of the two by name."""
    number = r"\d+" if numbered else ""
    pattern = rf"(?P<prefix>(.*\.)?){re.escape(names[0])}\.weight{'0' if numbered else ''}$"
    for prefix in [match["prefix"] for key in state if (match := re.match(pattern, key))]:
        layers = tuple(
            {
                key.removeprefix(f"{prefix}{name}."): state[key]
                for key in state
                if re.fullmatch(rf"{re.escape(prefix)}{re.escape(name)}\.(weight|bias){number}", key)
            }
            for name in names
        )
        if all(layers) and layers[0][f"weight{'0' if numbered else ''}"].dim() == (2 if numbered else 3):
            yield prefix, (layers[0], layers[1])


def _ours(layer: Layer, prefix: str, names: LinearNames) -> dict[str, Tensor]:
    first, second = (f"{prefix}{name}" for name in names)
    named = {
        f"{first}.weight": layer.up,
        f"{second}.weight": layer.down,
        f"{first}.bias": layer.up_bias,
        f"{second}.bias": layer.down_bias,
        f"{first}.{SUFFIX}": note(0),
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}
