"""Quantised checkpoints in transformers: experts stay in their bytes where a model runs through ``"fusible"``.

A subclass replaces a quantiser of transformers. If the model is loaded with ``experts_implementation="fusible"``, it
keeps the bytes; otherwise it does what its parent does. Before loading, parameters with the publisher's names replace
each weight of the experts; afterwards they become the parts of a stored weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import auto, base

from ..hugging_face.experts import Names
from ..hugging_face.gates import ModelExperts
from ..hugging_face.left_in_16_bits import CURE, are_meant, is_left
from ..hugging_face.stored_experts import keep
from ..hugging_face.stored_layouts import Layout, compressed_tensors, mxfp4_of_gpt_oss

NAME = "fusible"
PLANNED = "_fusible_planned"  # of an experts module while it is loaded: name of a weight -> Layout
Tensors = dict[str, Any]
"""The tensors that a conversion takes or returns by name, one or a list of them."""
_HOOKS = {
    "_process_model_before_weight_loading": ("model",),
    "_process_model_after_weight_loading": ("model",),
    "get_new_dtype": ("converter", "param", "dtype"),
    "update_attn_implementation": ("config",),
}


def experts_of(model: nn.Module) -> list[Any]:
    """The experts modules of a model that ``"fusible"`` runs."""
    candidates = [each for each in model.modules() if hasattr(each, "is_transposed") and hasattr(each, "has_gate")]
    return [each for each in candidates if hasattr(each, "down_proj")]


def runs_here(config: Any) -> bool:
    """Whether a model of this configuration is loaded for ``"fusible"``."""
    texts = (config, getattr(config, "text_config", None))
    return any(getattr(each, "_experts_implementation", None) == NAME for each in texts)


def shape_of(experts: Any, name: str) -> tuple[int, int, int]:
    """[E, N, K] of a weight that is not loaded yet."""
    groups, rows, columns = getattr(experts, name).shape
    return (groups, columns, rows) if experts.is_transposed else (groups, rows, columns)


def plan(experts: Any, name: str, layout: Layout) -> None:
    """Replaces a weight by parameters of the publisher's names and shapes, without data, which loading fills."""
    del experts._parameters[name]
    for part in (*layout.parts, *layout.more):
        empty = torch.empty(part.shape, dtype=part.dtype or torch.float32, device="meta")
        experts.register_parameter(f"{name}{part.suffix}", nn.Parameter(empty, requires_grad=False))
    experts.__dict__.setdefault(PLANNED, {})[name] = layout
    experts._is_hf_initialized = True  # the model's initialiser looks for the parameters that it knows


def settle(experts: Any, dtype: torch.dtype) -> None:
    """Turns the loaded parameters into stored weights.

    Raises:
        ValueError: the checkpoint lacks a part, a part is offloaded to a disk, or does not fit.
    """
    was_transposed = experts.is_transposed
    for name, layout in experts.__dict__.pop(PLANNED, {}).items():
        parts = {}
        for part in (*layout.parts, *layout.more):
            tensor = experts._parameters[f"{name}{part.suffix}"]
            if tensor.is_meta:
                raise ValueError(
                    f"{name}{part.suffix}: experts in {layout.recipe.name} cannot be offloaded to a disk. Give their "
                    "layer another device in device_map"
                )
            if not getattr(tensor, "_is_hf_initialized", False):
                raise ValueError(f"{name}{part.suffix}: the checkpoint lacks it, and has {layout.recipe.name} weights")
            parts[part.suffix] = tensor.data
        keep(experts, name, layout, parts, dtype, was_transposed)
    experts.is_transposed = False


def name_of(quantiser: base.HfQuantizer) -> str:
    """The name of the method of a quantiser."""
    method = quantiser.quantization_config.quant_method
    return str(getattr(method, "value", method))


def tell_of_16_bits(why: str, experts: ModelExperts) -> None:
    """Warns that the experts of a layer become 16 bits, with their size and the cure."""
    size = sum(2 * getattr(experts, name).numel() for name in Names.of(experts)[:2]) / 1e9
    warnings.warn(f"fusible: {why}: the experts become 16 bits, {size:.3g} GB a layer. {CURE}", stacklevel=2)


class KeepsBytes(base.HfQuantizer):  # type: ignore[misc]
    """The common part of quantisers that leave experts in their bytes, before the class of transformers."""

    def layout_of(self, experts: Any, name: str, shape: tuple[int, int, int]) -> Layout | None:
        """The layout in which the checkpoint stores a weight of the experts; None: no known layout, so the parent class
        loads it.
        """
        raise NotImplementedError

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        result = super()._process_model_before_weight_loading(model, **kwargs)
        if runs_here(model.config) and not getattr(self.quantization_config, "dequantize", False):
            self._plan(model)
        return result

    def _plan(self, model: Any) -> None:
        for experts in experts_of(model):
            names = Names.of(experts)[:2]
            layouts = {name: self.layout_of(experts, name, shape_of(experts, name)) for name in names}
            for name, layout in layouts.items():
                if None in layouts.values():
                    self._tell(experts)
                    break
                plan(experts, name, layout)  # type: ignore[arg-type]

    def why_16_bits(self, experts: nn.Module) -> str:
        """The reason for experts in 16 bits, where there is no layout."""
        return f"no product here reads this kind of {name_of(self)}"

    def _tell(self, experts: Any) -> None:
        if not are_meant(self.quantization_config):
            tell_of_16_bits(self.why_16_bits(experts), experts)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for path, experts in planned_of(model):
            try:
                settle(experts, model.dtype)
            except ValueError as error:
                raise ValueError(f"{path}.{error}") from None
        return super()._process_model_after_weight_loading(model, **kwargs)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        targets = getattr(converter, "target_patterns", None) or ()
        if any("_proj" in target and "experts" in target for target in targets):
            return None  # stays as it is in the file
        return super().get_new_dtype(converter, param, dtype)


def alone(value: Any) -> Tensor:
    """The tensor that a conversion was given, by itself or as a list of one."""
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor


class Same(ConversionOps):  # type: ignore[misc]
    """The reverse of an operation whose results are saved as they are."""

    def convert(self, input_dict: Tensors, *args: Any, **kwargs: Any) -> Tensors:
        return input_dict


def planned_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The experts modules whose weights :func:`plan` has replaced, with their paths."""
    return [(path, each) for path, each in model.named_modules() if PLANNED in each.__dict__]


def _mxfp4(parent: Any) -> Any:
    class KeepsMXFP4(KeepsBytes, parent):  # type: ignore[misc]
        def validate_environment(self, *args: Any, **kwargs: Any) -> None:
            self._asked = args, kwargs  # for kernels and a GPU, once it is known that the model is not ours
            self._is_ours = False

        def update_attn_implementation(self, config: Any) -> Any:  # the first hook that sees the configuration
            self._is_ours = runs_here(config) and self.pre_quantized and not self.quantization_config.dequantize
            if not self._is_ours:
                super().validate_environment(*self._asked[0], **self._asked[1])
            return super().update_attn_implementation(config)

        def layout_of(self, experts: Any, name: str, shape: tuple[int, int, int]) -> Layout | None:
            return mxfp4_of_gpt_oss(shape)

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            if self._is_ours:
                return self._plan(model)
            return parent._process_model_before_weight_loading(self, model, **kwargs)

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            return not self._is_ours and super().param_needs_quantization(model, param_name, **kwargs)

        def get_weight_conversions(self) -> Any:
            return [] if self._is_ours else super().get_weight_conversions()

        def get_load_operations(self) -> dict[str, Any]:
            return {} if self._is_ours else super().get_load_operations()

        def get_state_dict_and_metadata(self, model: Any) -> Any:
            return (None, {}) if self._is_ours else super().get_state_dict_and_metadata(model)

        @property
        def is_trainable(self) -> bool:
            return self._is_ours or super().is_trainable

    return KeepsMXFP4


def _compressed(parent: Any) -> Any:
    class KeepsCompressedTensors(KeepsBytes, parent):  # type: ignore[misc]
        def layout_of(self, experts: Any, name: str, shape: tuple[int, int, int]) -> Layout | None:
            from transformers.integrations.compressed_tensors import get_experts_scheme

            config = self.compressor.quantization_config
            scheme, sections = get_experts_scheme(config), 2 if name == "gate_up_proj" else 1
            return compressed_tensors(scheme, scheme.format or config.format, shape, sections)

    return KeepsCompressedTensors


class Refuses(base.HfQuantizer):  # type: ignore[misc]
    """The common part of quantisers with formats of experts that this library does not read; a base before the class of
    transformers.

    The packages of the parent are asked for once it is known that the model is not ours.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        base.HfQuantizer.__init__(self, *args, **kwargs)
        self._arguments = args, kwargs

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self._asked = args, kwargs

    def update_attn_implementation(self, config: Any) -> Any:  # the first hook that sees the configuration
        if runs_here(config):
            raise ValueError(
                f"fusible: no product here reads the bytes of {name_of(self).upper()}, which "
                "has the experts one by one, packed in another order. Load a checkpoint of the model in int4 of "
                "compressed-tensors ('pack-quantized'), or that in 16 bits with quantization_config="
                'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")'
            )
        super().__init__(*self._arguments[0], **self._arguments[1])
        super().validate_environment(*self._asked[0], **self._asked[1])
        return super().update_attn_implementation(config)


def _refused(parent: Any) -> Any:
    return type(f"Refuses{parent.__name__}", (Refuses, parent), {})


class TellsOf16Bits(base.HfQuantizer):  # type: ignore[misc]
    """The part of quantisers whose formats nothing here reads, before the class of transformers: it warns of experts
    that are in 16 bits after loading.
    """

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> object:
        result: object = super()._process_model_after_weight_loading(model, **kwargs)
        settings = self.quantization_config
        if runs_here(model.config) and not getattr(settings, "dequantize", False) and not are_meant(settings):
            for experts in experts_of(model):
                if is_left(experts.down_proj):
                    tell_of_16_bits(f"transformers does not keep experts in {name_of(self)}", experts)
                    break
        return result


def _telling(parent: type) -> type:
    return type(f"Telling{parent.__name__}", (TellsOf16Bits, parent), {})


REPLACED = {
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "gptq": _refused,
    "awq": _refused,
}


def register(replaced: Mapping[str, Callable[[Any], Any]], home: ModuleType) -> None:
    """Replaces all quantisers of transformers, by these or by :class:`TellsOf16Bits`; called once, by the import of the
    integration.

    A transformers whose quantisers have other hooks keeps them, with a warning.

    Args:
        home: the module in which pickles of models look for the classes; its import makes them.
    """
    for hook, parameters in _HOOKS.items():
        method = getattr(base.HfQuantizer, hook, None)
        if method is None or not set(parameters) <= set(signature(method).parameters):
            warnings.warn(f"fusible: this transformers has no HfQuantizer.{hook}{parameters}", stacklevel=2)
            return
    for method, parent in auto.AUTO_QUANTIZER_MAPPING.items():
        if parent.__module__ != home.__name__:
            kind = replaced.get(method, _telling)(parent)
            name = kind.__name__ if getattr(home, kind.__name__, None) is None else f"{kind.__name__}_{method}"
            kind.__module__, kind.__qualname__, kind.__name__ = home.__name__, name, name
            setattr(home, name, kind)
            auto.AUTO_QUANTIZER_MAPPING[method] = kind
