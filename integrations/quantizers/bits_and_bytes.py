"""NF4 of bitsandbytes in transformers, for experts: quantised while they are loaded, or stored so one by one.

transformers quantises only linears. Since it stacks experts, it neither quantises them, nor loads experts that it has
stored as linears. Here the tensors of a stored expert become its part of the stack, and are saved unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform

from ...ops.formats.nf4 import NF4_BLOCK
from ..hugging_face.experts_in_nf4 import SUFFIXES, ExpertsInNF4
from ..hugging_face.stored_experts import stored_of
from ..hugging_face.stored_layouts import Layout, nf4
from . import PLANNED, KeepsBytes, Same, Tensors, alone, runs_here

_OF_EXPERTS = re.compile(r"experts\.(\d+\..*\.quant_state\.bitsandbytes__|\w+_proj_scale$)")
_OF_A_STACK = re.compile(r"experts\.[a-z_]+\.quant_state\.bitsandbytes__")
_UNDER_OTHER_NAMES = re.compile(r"\.experts\.(?!\d+\.).*\.quant_state\.bitsandbytes__")
_CURE = (
    "Load the 16-bit checkpoint of the model with quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
    'bnb_4bit_quant_type="nf4"): its experts become NF4 while they are loaded, and save_pretrained writes them so'
)


def _keeps_nf4(parent: type) -> type:
    class KeepsNF4(KeepsBytes, parent):  # type: ignore[misc]
        def layout_of(self, experts: nn.Module, name: str, shape: tuple[int, int, int]) -> Layout | None:
            if id(experts) in self._in_16_bits:
                return None
            config = self.quantization_config
            is_nf4 = config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_quant_storage == torch.uint8
            if is_nf4 and not shape[2] % NF4_BLOCK:
                return nf4(shape, config.bnb_4bit_use_double_quant, 2 if name == "gate_up_proj" else 1)
            if self.pre_quantized:
                raise ValueError(f"fusible: {name} {list(shape)}: {self.why_16_bits(experts)}. {_CURE}")
            return None

        def why_16_bits(self, experts: nn.Module) -> str:
            if id(experts) in self._in_16_bits:
                return "the checkpoint has experts that were left in 16 bits when it was quantised"
            return super().why_16_bits(experts)

        def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
            if runs_here(model.config):
                layers = _layers_in_4_bits(kwargs.get("checkpoint_files")) if self.pre_quantized else None
                others = [
                    each for name, each in model.named_modules() if layers is not None and _layer_of(name) not in layers
                ]
                self._in_16_bits = set(map(id, others))  # numbers, as conversions copy the quantiser deeply
            super()._process_model_before_weight_loading(model, **kwargs)

        def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
            return _planned(model, param_name) is not None or super().param_needs_quantization(
                model, param_name, **kwargs
            )

        def get_quantize_ops(self) -> ConversionOps:
            return _QuantizesStacks(super().get_quantize_ops())

        def update_weight_conversions(
            self, weight_conversions: list[WeightTransform], model: nn.Module
        ) -> list[WeightTransform]:
            updated: list[WeightTransform] = super().update_weight_conversions(weight_conversions, model)
            if not runs_here(model.config):
                return updated
            parameters = "\n".join([name for name, _ in model.named_parameters()])
            return [_keeping(each, parameters) for each in updated]

    return KeepsNF4


REPLACED = {"bitsandbytes_4bit": _keeps_nf4}


def _keys(files: Sequence[str]) -> Iterator[str]:
    for file in files:
        with safe_open(file, "pt") as opened:
            yield from opened.keys()


def _layers_in_4_bits(files: Sequence[str] | None) -> set[str] | None:
    """The layers whose experts a checkpoint has in 4 bits; None: unknown, and loading reports missing tensors.

    Raises:
        ValueError: the checkpoint has a stack of experts that was quantised as one matrix, or experts under names that
            transformers does not load.
    """
    if files is None or not all([str(file).endswith(".safetensors") for file in files]):
        return None
    keys = list(_keys(files))
    if (stack := next(filter(_OF_A_STACK.search, keys), None)) is not None:
        raise ValueError(
            f"fusible: {stack}: the checkpoint has a stack of experts that bitsandbytes has quantised as one matrix, "
            f"which transformers does not load either. {_CURE}"
        )
    if (other := next(filter(_UNDER_OTHER_NAMES.search, keys), None)) is not None:
        name = other.partition(".quant_state.")[0]
        raise ValueError(
            f"fusible: {name}: the checkpoint has experts in 4 bits under a name that transformers does not load, so "
            f"they would be random numbers. It loads experts.0.gate_proj.weight and the like. {_CURE}"
        )
    return set(map(_layer_of, filter(_OF_EXPERTS.search, keys)))


def _layer_of(name: str) -> str:
    layer = re.search(r"layers\.\d+\.", name)
    return layer[0] if layer else ""


def _planned(model: nn.Module, name: str) -> Layout | None:
    """The layout of a weight of experts, while it is loaded."""
    path, _, weight = name.rpartition(".")
    layout: Layout | None = model.get_submodule(path).__dict__.get(PLANNED, {}).get(weight)
    return layout


def _keeping(converter: WeightTransform, parameters: str) -> WeightTransform:
    """The conversion, so that it keeps experts as they are stored, and can be reversed."""
    sources, targets = (getattr(converter, f"_original_{end}_patterns") for end in ("source", "target"))
    if targets == ["weight"] and isinstance(converter, WeightConverter):
        converter.operations = [_OfLinears(*converter.operations)]
        return converter
    decoders = [f"{targets[0]}{suffix}" for suffix in ("_scale", "_factor")]
    decoders = [each for each in decoders if re.search(f"{each}$", parameters, re.MULTILINE)]
    if not decoders or not isinstance(converter, WeightConverter) or not all("*" in each for each in sources):
        return converter
    every = [f"{source}{suffix}" for source in sources for suffix in SUFFIXES]
    return converter.copy(every, [targets[0], *decoders], operations=[_StacksExperts(converter.operations)])


class _OfLinears(ConversionOps):  # type: ignore[misc]
    """A linear of bitsandbytes as its parent makes it, and a router, which transformers 4 had as one, in 16 bits.

    Both are saved under the names of their tensors, where transformers has no reverse.
    """

    def __init__(self, parent: ConversionOps) -> None:
        self._parent, self.hf_quantizer = parent, parent.hf_quantizer  # whose operations get tensors in their dtypes

    def convert(self, input_dict: Tensors, *args: Any, **kwargs: Any) -> Tensors:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        if len(input_dict) == 1 or self.hf_quantizer.param_needs_quantization(model, name):
            result: Tensors = self._parent.convert(input_dict, *args, **kwargs)
            return result
        from bitsandbytes.functional import QuantState, dequantize_4bit

        parts = {key: alone(value) for key, value in input_dict.items()}
        weight = parts.pop("weight")
        return {"weight": dequantize_4bit(weight, QuantState.from_dict(parts, weight.device))}

    @property
    def reverse_op(self) -> ConversionOps:
        return Same()


class _QuantizesStacks(ConversionOps):  # type: ignore[misc]
    """Quantises the experts of a layer as they arrive, and other tensors as its parent class does."""

    def __init__(self, others: ConversionOps) -> None:
        self._others = others

    def convert(self, input_dict: Tensors, *args: Any, **kwargs: Any) -> Tensors:
        model, full_name = kwargs.get("model"), kwargs.get("full_layer_name")
        layout = None if model is None or full_name is None else _planned(model, full_name)
        if layout is None:
            result: Tensors = self._others.convert(input_dict, *args, **kwargs)
            return result
        (value,) = input_dict.values()
        weight = alone(value)
        upright = weight if tuple(weight.shape) == layout.shape else weight.mT
        parts = layout.write(layout.recipe.weight(upright))
        return {f"{full_name}{suffix}": part for suffix, part in parts.items()}


class _OfExperts(ConversionOps):  # type: ignore[misc]
    """The common part of an operation and its reverse: experts in 16 bits go the way of transformers."""

    supports_many_to_many = True

    def __init__(self, in_16_bits: Sequence[ConversionOps]) -> None:
        self._in_16_bits = in_16_bits

    def _as_16_bits(self, tensors: Tensors, sources: list[str], targets: list[str], **kwargs: Any) -> Tensors:
        for operation in self._in_16_bits:
            tensors = operation.convert(tensors, source_patterns=sources, target_patterns=targets, **kwargs)
        return tensors


class _StacksExperts(_OfExperts):
    """The parts of a stack, of the tensors of each expert; gate and up are sections of its rows."""

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Tensors:
        weights, full_name = source_patterns[:: len(SUFFIXES)], kwargs["full_layer_name"]
        if set(input_dict) <= set(weights):
            return self._as_16_bits(input_dict, weights, target_patterns[:1], **kwargs)
        path, _, name = full_name.rpartition(".")
        planned = kwargs["model"].get_submodule(path).__dict__[PLANNED]
        form, sections = ExpertsInNF4(planned[name], len(weights)), []
        for weight in weights:
            tensors = {suffix: input_dict.get(f"{weight}{suffix}", []) for suffix in SUFFIXES}
            dtype, parts = form.read(f"{path}.*.{weight.rpartition('*.')[2]}", tensors)
            planned[name] = planned[name]._replace(quantised_from=dtype)
            sections.append(parts)
        whole = [torch.cat(part, 1) for part in zip(*sections, strict=True)]
        pieces = planned[name].parts
        return {t: part.view(p.shape) for t, part, p in zip(target_patterns, whole, pieces, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _SplitsExperts([each.reverse_op for each in self._in_16_bits[::-1]])


class _SplitsExperts(_OfExperts):
    """The reverse of :class:`_StacksExperts`."""

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Tensors:
        weights = target_patterns[:: len(SUFFIXES)]
        if len(input_dict) == 1:
            return self._as_16_bits(input_dict, source_patterns, weights, **kwargs)
        experts = kwargs["model"].get_submodule(kwargs["full_layer_name"].partition(".*.")[0])
        stored = stored_of(experts, source_patterns[0].rpartition(".")[2])
        assert stored is not None
        assert stored.layout is not None
        parts = [input_dict[pattern][0] for pattern in source_patterns]
        return ExpertsInNF4(stored.layout, len(weights)).write(
            weights, parts, stored.layout.quantised_from or stored.dtype
        )

    @property
    def reverse_op(self) -> ConversionOps:
        return _StacksExperts([each.reverse_op for each in self._in_16_bits[::-1]])
