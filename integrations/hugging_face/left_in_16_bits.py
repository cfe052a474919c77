"""Experts in 16 bits of a model that is quantised: whether they are meant to be, and what to do if not."""

from __future__ import annotations

import re

from torch import Tensor

_LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "skip_modules", "ignore")
_EXPERTS = re.compile(r"(?<!shared_)experts")
CURE = (
    'Load a checkpoint in 16 bits with experts_implementation="fusible" and quantization_config='
    'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), which quantises experts too, or one in another '
    'format of docs/gpt_oss.md. If they are meant to be in 16 bits, name "experts" in llm_int8_skip_modules, '
    "modules_to_not_convert or ignore of the quantization_config"
)


def are_meant(settings: object) -> bool:
    """Whether the settings of a quantisation name the experts among the modules that it leaves."""
    both = settings, getattr(settings, "quantization_config", None)  # compressed-tensors has them one level down
    named = [name for each in both for of in _LISTS for name in getattr(each, of, None) or ()]
    return any(_EXPERTS.search(name) for name in named)


def is_left(weight: Tensor) -> bool:
    """Whether a stack of experts is in 16 bits or more; a subclass of tensors may store fewer than its dtype says."""
    return weight.dim() == 3 and weight.element_size() > 1 and type(weight.data) is Tensor
