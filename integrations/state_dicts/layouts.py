"""Layouts of the experts of one layer, theirs and ours: pure functions on tensors.

A :class:`Layer` is the logical layout: a matrix an expert, [out, in], gate rows before up rows, whatever a GLU reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...fuser.contract.tracing import has_no_data

Part = Mapping[str, Tensor]
"""The tensors of one layer, by their names in it."""


T = TypeVar("T")
_NAN = 255  # of e8m0


class Layer(NamedTuple):
    """The experts of one layer: up [E, N, K] with N = 2F where gated, down [E, K, F], their biases [E, N], [E, K]."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def converted(part: Part, conversion: Callable[[], T]) -> T:
    """Runs a conversion of the tensors of a layer, and rewords its errors.

    Raises:
        ValueError: a tensor is missing, or shapes do not fit the conversion or each other.
    """
    try:
        return conversion()
    except KeyError as missing:
        raise ValueError(f"{missing.args[0]} is missing; there are {', '.join(sorted(part))}") from None
    except (RuntimeError, IndexError, ValueError) as error:
        shapes = ", ".join(f"{name} {list(part[name].shape)}" for name in sorted(part))
        raise ValueError(f"{error}; got {shapes}") from None


def fitting(layer: Layer, gated: bool | None = None) -> Layer:
    """The layer, if the shapes of its tensors fit one another; ``gated`` says whether N is 2F, if that is known.

    Raises:
        ValueError: they do not.
    """
    groups, columns, *features = layer.up.shape
    hidden = {True: [columns // 2], False: [columns], None: [columns // 2, columns]}[gated]
    if list(layer.down.shape) not in [[groups, *features, size] for size in hidden] or len(features) != 1:
        kind = "" if gated is None else " of gated experts" if gated else " of ungated experts"
        up, down = list(layer.up.shape), list(layer.down.shape)
        raise ValueError(f"up {up} and down {down} do not fit one another as [E, out, in]{kind}")
    return layer


def interleave(tensor: Tensor, block: int, dim: int) -> Tensor:
    """Rearranges [gate, up] along a dimension into alternating blocks: ``block`` of gate, ``block`` of up, …"""
    return _swapped(tensor, dim, (2, -1, block))


def deinterleave(tensor: Tensor, block: int, dim: int) -> Tensor:
    """The inverse of :func:`interleave`."""
    return _swapped(tensor, dim, (-1, 2, block))


def concat(layer: Layer, block: int | None) -> Layer:
    """The layer with gate before up; ``block``, if any, is the size in which they alternate now."""
    if not block:
        return layer
    bias = None if layer.up_bias is None else deinterleave(layer.up_bias, block, -1)
    return layer._replace(up=deinterleave(layer.up, block, -2), up_bias=bias)


def _swapped(tensor: Tensor, dim: int, sizes: tuple[int, int, int]) -> Tensor:
    """Splits a dimension, counted from the end, into three, and swaps the first two."""
    end = dim % tensor.dim() + 2
    apart: Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return apart.transpose(end - 2, end - 1).flatten(end - 2, end)


def from_hugging_face(part: Part, transposed: bool, interleaved: bool) -> Layer:
    """``gate_up_proj`` or ``up_proj``, and ``down_proj``; ``interleaved``: gate and up columns alternate."""
    name = "gate_up_proj" if "gate_up_proj" in part else "up_proj"
    up, down = (part[n].mT if transposed else part[n] for n in (name, "down_proj"))
    bias = part.get(f"{name}_bias")
    if interleaved:
        up, bias = deinterleave(up, 1, -2), None if bias is None else deinterleave(bias, 1, -1)
    layer = Layer(up.contiguous(), down.contiguous(), bias, part.get("down_proj_bias"))
    return fitting(layer, name == "gate_up_proj")


def to_hugging_face(layer: Layer, gated: bool, transposed: bool, interleaved: bool) -> dict[str, Tensor]:
    """The inverse of :func:`from_hugging_face`."""
    name, (up, down, bias, down_bias) = "gate_up_proj" if gated else "up_proj", fitting(layer, gated)
    if interleaved:
        up, bias = interleave(up, 1, -2), None if bias is None else interleave(bias, 1, -1)
    weights = (w.mT.contiguous() if transposed else w for w in (up, down))
    biases = {f"{name}_bias": bias, "down_proj_bias": down_bias}
    return {**dict(zip((name, "down_proj"), weights, strict=True)), **_without_none(biases)}


class PackedLayer(NamedTuple):
    """The experts of one layer in MXFP4: both matrices as bytes of two values, with their scales and the biases."""

    layer: Layer
    up_scales: Tensor
    down_scales: Tensor


def from_mxfp4(part: Part, interleaved: bool) -> PackedLayer:
    """``gate_up_proj_blocks`` uint8 [E, 2F, K / 32, 16], ``gate_up_proj_scales`` [E, 2F, K / 32], and so on.

    The matrices are [E, out, in], unlike those of the model. The two values of a byte are neighbours in a row.
    """
    (up, up_scales), (down, down_scales) = (_packed(part, name) for name in ("gate_up_proj", "down_proj"))
    bias = part.get("gate_up_proj_bias")
    if up.shape[1] % 2:
        raise ValueError(f"gate_up_proj_blocks must have as many rows of gate as of up, not {up.shape[1]} in all")
    if interleaved:
        up, up_scales = (deinterleave(rows, 1, -2) for rows in (up, up_scales))
        bias = None if bias is None else deinterleave(bias, 1, -1)
    groups, columns, packed = up.shape
    if (down.shape[0], down.shape[1] * 2, 2 * down.shape[2]) != (groups, 4 * packed, columns // 2):
        raise ValueError("the blocks of gate_up_proj and down_proj do not fit one another")
    scales = (each.view(torch.float8_e8m0fnu) for each in (up_scales, down_scales))
    return PackedLayer(Layer(up, down, bias, part.get("down_proj_bias")), *scales)


def _packed(part: Part, name: str) -> tuple[Tensor, Tensor]:
    """The bytes [E, out, in / 2] of a matrix and its scales uint8 [E, out, in / 32]."""
    blocks, scales = part[f"{name}_blocks"], part[f"{name}_scales"]
    if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[-1] != 16:
        raise ValueError(f"{name}_blocks must be uint8 [E, out, in / 32, 16], not {_described(blocks)}")
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu) or scales.shape != blocks.shape[:-1]:
        expected = f"uint8 or float8_e8m0fnu {list(blocks.shape[:-1])}, as the blocks are {list(blocks.shape)}"
        raise ValueError(f"{name}_scales must be {expected}, not {_described(scales)}")
    scales = scales.view(torch.uint8)
    if not (scales.is_meta or has_no_data(scales)) and (nans := int((scales == _NAN).sum())):
        raise ValueError(f"{name}_scales must be exponents below {_NAN}, which is NaN, and has it {nans} times")
    return blocks.flatten(-2), scales


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def from_torchtitan(part: Part) -> Layer:
    """``w1`` gate [E, F, K], ``w3`` up, ``w2`` down [E, K, F]; or ``w13`` [E, F, 2, K]. Shape suffixes are allowed."""
    named = {name.partition("_")[0]: tensor for name, tensor in part.items()}
    if "w13" in named:
        return fitting(Layer(named["w13"].transpose(1, 2).flatten(1, 2), named["w2"]), gated=True)
    return fitting(Layer(torch.cat([named["w1"], named["w3"]], 1), named["w2"]), gated=True)


def to_torchtitan(layer: Layer) -> dict[str, Tensor]:
    """Converts gated experts without biases to ``w1``, ``w2``, ``w3``."""
    if layer.up_bias is not None or layer.down_bias is not None:
        raise ValueError("to_torchtitan: its grouped experts have no biases")
    gate, up = fitting(layer, gated=True).up.chunk(2, 1)
    return {"w1": gate.contiguous(), "w2": layer.down, "w3": up.contiguous()}


def from_transformer_engine(up: Part, down: Part, glu_interleave_size: int | None) -> Layer:
    """``weight0``, ``weight1``, … and ``bias0``, … of the two linears."""
    weight, bias = _stacked(up, "weight"), _stacked(up, "bias")
    down_weight = _stacked(down, "weight")
    assert weight is not None
    assert down_weight is not None
    return fitting(concat(Layer(weight, down_weight, bias, _stacked(down, "bias")), glu_interleave_size))


def to_transformer_engine(layer: Layer, glu_interleave_size: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inverse of :func:`from_transformer_engine`."""
    up, bias = layer.up, layer.up_bias
    if glu_interleave_size is not None:
        up = interleave(up, glu_interleave_size, -2)
        bias = None if bias is None else interleave(bias, glu_interleave_size, -1)
    pairs = ({"weight": up, "bias": bias}, {"weight": layer.down, "bias": layer.down_bias})
    first, second = (
        {f"{name}{i}": part for name, stack in pair.items() if stack is not None for i, part in enumerate(stack)}
        for pair in pairs
    )
    return first, second


def _stacked(part: Part, name: str) -> Tensor | None:
    count = sum(key.startswith(name) and key[len(name) :].isdigit() for key in part)
    return torch.stack([part[f"{name}{i}"] for i in range(count)]) if count else None


def _without_none(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
