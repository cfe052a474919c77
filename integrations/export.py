"""A model in few bits with adapters, written as the 16-bit model that it stands for, a layer at a time."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import layer as peft_layer
from safetensors.torch import save_file
from torch import Tensor, nn

from ..ops.formats.copies import Weight
from ..ops.formats.float8_weight import Float8Weight
from .hugging_face.stored_experts import stored_of, weight_decoded_by

_WRAPPED = ("base_layer",)
_SCALES = "_scale_inv"


@torch.no_grad()
def export_merged(model: Any, folder: str | Path) -> None:
    """Writes a model with the active adapters merged into its weights, in the dtype of its other parameters.

    ``from_pretrained`` reads the folder: ``config.json`` without a quantisation, and a file for each layer. One layer
    is decoded at a time.

    Args:
        model: the result of ``get_peft_model``, or a model without adapters.
        folder: where to write; created if it is not there.

    Raises:
        ValueError: a weight besides the experts is stored in a format that nothing here decodes; nothing is written.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    refuse = [f"{name} is {p.dtype}" for name, p in base.named_parameters() if _is_unknown(base, name, p)]
    if refuse:
        raise ValueError(f"export_merged: {refuse[0]}, which nothing here decodes; load the model in 16 bits")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for number, tensors in enumerate(_by_layer(_merged(base))):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = deepcopy(base.config)
    config.__dict__.pop("quantization_config", None)
    config.save_pretrained(path)


def _is_unknown(base: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether a parameter is codes of something else than experts, FP8 linears and linears of bitsandbytes."""
    path, _, last = name.rpartition(".")
    module = base.get_submodule(path)
    if any(each and last.startswith(each) for each in _stored_names(module)) or _state_of(parameter) is not None:
        return False
    are_codes = parameter.element_size() == 1 or not parameter.is_floating_point()
    return are_codes and getattr(module, f"{last}{_SCALES}", None) is None


def _state_of(parameter: Tensor) -> Any:
    """The quantisation state of a parameter of bitsandbytes; None: another parameter."""
    return getattr(parameter, "quant_state", None)


def _stored_names(module: Any) -> tuple[str, ...]:
    """The weights of an experts module that are bytes."""
    return tuple([name for name in ("gate_up_proj", "up_proj", "down_proj") if stored_of(module, name) is not None])


def _by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of a layer, and those between layers."""
    part: dict[str, Tensor] = {}
    layer: str | None = None
    for name, tensor in tensors:
        layer_name = re.match(r".*?layers\.\d+\.", name)
        now = layer_name[0] if layer_name else ""
        if part and now != layer:
            yield part
            part = {}
        part[name], layer = tensor.contiguous(), now
    if part:
        yield part


def _merged(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the 16-bit model, each with its adapters."""
    adapters: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for module in base.modules():
        if isinstance(module, peft_layer.LoraLayer):
            adapters[id(module.get_base_layer()), getattr(module, "parameter_name", "weight")].append(module)
    for path, module in base.named_modules():
        steps = path.split(".") if path else []
        if any(step.startswith("lora_") for step in steps) or isinstance(module, peft_layer.LoraLayer):
            continue
        prefix = ".".join([step for step in steps if step not in _WRAPPED])
        for name, tensor in _tensors(module, base.dtype):  # type: ignore[arg-type]
            delta = [d for wrapper in adapters[id(module), name] for d in _deltas(wrapper)]
            whole = tensor if not delta else (tensor.float() + sum(delta)).to(base.dtype)  # type: ignore[arg-type]
            yield ".".join(filter(None, (prefix, name))), _as_the_class_has_it(module, name, whole)


def _tensors(module: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module without those of its children; bytes as values, [E, N, K] of experts."""
    stored, held = _stored_names(module), dict(module._parameters)
    held |= {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for name, tensor in held.items():
        if name in stored:
            of = stored_of(module, name)
            assert of is not None
            yield name, of.recipe.weight_values(of.weight(module)).to(of.dtype)
        elif tensor is None or _decodes_bytes(module, name):
            continue
        elif (state := _state_of(tensor)) is not None:
            yield name, import_module("bitsandbytes.functional").dequantize_4bit(tensor.data, state).to(dtype)
        elif tensor.element_size() == 1 and tensor.is_floating_point():
            parts = Weight(tensor.detach().unsqueeze(0), getattr(module, f"{name}{_SCALES}").detach().unsqueeze(0))
            yield name, Float8Weight().decoded(parts, dtype)[0]
        else:
            yield name, tensor.detach()


def _decodes_bytes(module: Any, name: str) -> bool:
    """Whether a tensor of the module decodes a weight that is bytes."""
    weight = getattr(module, weight_decoded_by(name) or "", None)
    return isinstance(weight, Tensor) and weight.element_size() == 1


def _deltas(wrapper: Any) -> Iterator[Tensor]:
    """The change of a weight by each active adapter, float32; for stored experts [E, N, K]."""
    for name in wrapper.active_adapters:
        if name in wrapper.lora_A:
            yield wrapper.get_delta_weight(name).float()


def _as_the_class_has_it(module: Any, name: str, whole: Tensor) -> Tensor:
    """Some classes have [E, K, N]."""
    of = stored_of(module, name)
    return whole.mT if of is not None and of.is_transposed else whole
