"""FP8 checkpoints with scales of blocks: transformers loads them; here their scales are checked, and saved unchanged.

transformers keeps scales in float32 and writes float32, whatever the checkpoint has.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers import base

from . import runs_here

SUFFIX = "_scale_inv"
_SCALES = re.compile(r"(weight_scale_inv|\.scale|\.qscale_weight)$")  # the names that transformers knows
_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16, "F8_E8M0": torch.float8_e8m0fnu}


class KeepsScales(base.HfQuantizer):  # type: ignore[misc]
    """The part of the quantiser for models that run through ``"fusible"``, before the class of transformers."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files") if runs_here(model.config) else None
        self._dtypes = _dtypes_of_scales(files or ())
        super()._process_model_before_weight_loading(model, **kwargs)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> object:
        result: object = super()._process_model_after_weight_loading(model, **kwargs)
        if runs_here(model.config):
            for path, module in model.named_modules():
                self._check(path, module)
        return result

    def _check(self, path: str, module: nn.Module) -> None:
        for name, scales in _scales_of(module):
            weight = name.removesuffix(SUFFIX)
            if scales.is_meta:  # offloaded to a disk, from which accelerate reads them for a call
                continue
            for part in (weight, name) if self.pre_quantized else ():
                if not getattr(module._parameters[part], "_is_hf_initialized", False):
                    raise ValueError(f"{path}.{part}: the checkpoint lacks it, and has FP8 weights with scales")
            if wrong := int((~scales.float().isfinite()).sum()):
                raise ValueError(f"{path}.{weight}: scales must be finite, and {wrong} are not")
        dtypes = [*self._dtypes[path.endswith("experts")]]
        if len(dtypes) == 1 and dtypes[0] is not None and any(_scales_of(module)):
            module.register_state_dict_post_hook(partial(_narrow, dtypes[0]))  # type: ignore[no-untyped-call]


def _scales_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The scales of a module by name, beside weights of the same name without the suffix."""
    for name, tensor in module._parameters.items():
        if tensor is not None and name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in module._parameters:
            yield name, tensor.detach()


def _dtypes_of_scales(files: Sequence[str]) -> dict[bool, set[torch.dtype | None]]:
    """The dtypes of scales in the files, those of experts under True; None stands for one that is kept."""
    dtypes = defaultdict[bool, set[torch.dtype | None]](set)
    for file in filter(lambda file: str(file).endswith(".safetensors"), files):
        with safe_open(file, "pt") as opened:
            for name in filter(_SCALES.search, opened.keys()):
                dtypes[".experts." in name].add(_NARROW.get(opened.get_slice(name).get_dtype()))
    return dtypes


def _narrow(dtype: torch.dtype, module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
    """Gives the scales in a state dict the dtype that the checkpoint has, in which they are exact."""
    for name, _ in _scales_of(module):
        scales = state.get(f"{prefix}{name}")
        if scales is None or scales.dtype != torch.float32 or scales.is_meta:
            continue
        if torch.equal(scales.to(dtype).float(), scales):
            state[f"{prefix}{name}"] = scales.to(dtype)


def _keeps_scales(parent: type) -> type:
    return type(f"Keeps{parent.__name__}", (KeepsScales, parent), {})


REPLACED = {"fp8": _keeps_scales}
