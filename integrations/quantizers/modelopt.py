"""Checkpoints of NVIDIA's ModelOpt in NVFP4, which transformers does not read: their quantiser and its configuration.

Experts stay in their bytes. Other linears are decoded to 16 bits while they are loaded, as no product of transformers
reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...ops.formats.copies import Weight
from ...ops.formats.nvfp4_weight import NVFP4Weight
from ..hugging_face.stored_layouts import Layout, modelopt_nvfp4
from . import KeepsBytes, Same, Tensors, alone, runs_here

METHOD = "modelopt"
_FACTOR = "weight_scale_2"


class ModelOptConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` that ModelOpt writes; only NVFP4 is read.

    Raises:
        ValueError: another algorithm.
    """

    def __init__(self, quant_algo: str = "NVFP4", **others: Any) -> None:
        self.quant_method, self.quant_algo = METHOD, quant_algo
        for name, value in others.items():
            if name != "quant_method":
                setattr(self, name, value)
        if quant_algo != "NVFP4":
            raise ValueError(f"fusible: ModelOpt's {quant_algo} is not read here; NVFP4 is")


class ModelOptQuantizer(KeepsBytes):
    """Loads NVFP4 experts as their bytes, for models that run through ``"fusible"``."""

    serialized_names = {"weight": ["weight", "weight_scale", _FACTOR]}

    def update_attn_implementation(self, config: Any) -> Any:
        if not runs_here(config):
            raise ValueError(
                "fusible: transformers does not read ModelOpt's NVFP4; load the model with "
                'experts_implementation="fusible"'
            )
        return super().update_attn_implementation(config)

    def layout_of(self, experts: Any, name: str, shape: tuple[int, int, int]) -> Layout | None:
        return modelopt_nvfp4(shape, 2 if name == "gate_up_proj" else 1)

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": _Decode}

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        updated = super().update_weight_conversions(weight_conversions, model)
        for converter in updated:
            targets = getattr(converter, "_original_target_patterns", None) or ("",)
            if targets[0].endswith("_scale_2"):
                converter.operations = [_StackNumbers()]
        return updated

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class _StackNumbers(ConversionOps):  # type: ignore[misc]
    """The numbers of experts, [E, sections]: gate's beside up's."""

    def convert(
        self, input_dict: dict[str, list[Tensor]], source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        columns = [torch.stack([number.reshape(()) for number in numbers]) for numbers in input_dict.values()]
        return {target_patterns[0]: torch.stack(columns, 1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _UnstackNumbers()


class _UnstackNumbers(ConversionOps):  # type: ignore[misc]
    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        (value,) = input_dict.values()
        whole = alone(value)
        columns = zip(target_patterns, whole.unbind(1), strict=True)
        return {p.replace("*", str(e)): number.clone() for p, column in columns for e, number in enumerate(column)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _StackNumbers()


class _Decode(ConversionOps):  # type: ignore[misc]
    """A linear that is no expert, in the dtype of its parameter."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: Tensors, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        parts = {key: alone(value) for key, value in input_dict.items()}
        dtype = model.get_parameter(name).dtype
        if "weight_scale" not in parts:
            return {name: parts["weight"].to(dtype)}
        if _FACTOR not in parts:
            raise ValueError(f"{name}_scale_2: the checkpoint lacks it, and has {name}_scale")
        data, scales, factor = (parts[key].unsqueeze(0) for key in ("weight", "weight_scale", _FACTOR))
        return {name: NVFP4Weight().decoded(Weight(data, scales, factor.view(1, 1)), dtype)[0]}

    @property
    def reverse_op(self) -> ConversionOps:
        return Same()  # decoded weights are saved in 16 bits


def register() -> None:
    """Makes the method known to transformers, unless a later one knows it."""
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING and METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(METHOD)(ModelOptConfig)
        auto.register_quantizer(METHOD)(ModelOptQuantizer)
