"""Runs PEFT's LoRA adapters of experts (``target_parameters``) as low-rank products, once this module is imported.

``import fusible`` imports it in programs that import PEFT's LoRA, before or after.

PEFT itself adds ``B A`` to the weights of all experts at every forward, and keeps the sum for the backward. Here a
model whose experts run through ``"fusible"`` multiplies the rows by the frozen weights and by the adapters. Training,
saving, loading and merging of adapters remain PEFT's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn

from . import lora
from .gates import ModelExperts
from .lora import Adapter

if TYPE_CHECKING:
    from peft.tuners.lora.layer import ParamWrapper

NAME = "fusible"
_METHOD = "_activate_lora"  # private; its arguments and effect have not changed since PEFT 0.17

ActivateAdapters = Callable[["ParamWrapper", list[str]], AbstractContextManager[None]]


def register() -> None:
    """Gives the adapters to experts modules that run through ``"fusible"``; called once, when this module is imported.

    If this PEFT activates adapters in another way, nothing changes and a warning says so.
    """
    wrapper: Any = getattr(peft_layer, "ParamWrapper", None)
    original: ActivateAdapters | None = getattr(wrapper, _METHOD, None)
    if original is None:
        warnings.warn("fusible: this version of PEFT merges the adapters of experts in every forward", stacklevel=3)
    elif not hasattr(original, "_fusible"):
        setattr(wrapper, _METHOD, _activate(original))
        wrapper.__init__ = _init(wrapper.__init__)


def _init(original: Callable[..., None]) -> Callable[..., None]:
    """Checks a parameter while its adapter is made, by ``get_peft_model`` or any other call."""

    @wraps(original)
    def init(
        self: ParamWrapper, base_layer: nn.Module, adapter_name: str, parameter_name: str, *args: object, **kw: object
    ) -> None:
        inner = base_layer
        while isinstance(inner, peft_layer.ParamWrapper):
            inner = inner.base_layer
        check_adaptable(inner, parameter_name)
        original(self, base_layer, adapter_name, parameter_name, *args, **kw)

    return init


def check_adaptable(module: object, name: str) -> None:
    """Checks that PEFT can adapt a parameter, whichever implementation runs the module.

    Raises:
        ValueError: the parameter is stored as bytes with separate scales. PEFT would add adapters to the bytes, which
        get no gradient in transformers: nothing is trained, and the output hardly changes.
    """
    parameter = getattr(module, name, None)
    if getattr(module, f"{name}_scale_inv", None) is None or not isinstance(parameter, Tensor):
        return
    if parameter.dtype.itemsize == 1:
        raise ValueError(
            f"{type(module).__name__}.{name}: PEFT cannot adapt {parameter.dtype} with scales beside it: the adapters "
            "would be added to the bytes, and get no gradients. Load the model in 16 bits, as "
            "from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True)) does, or leave "
            f"{name!r} out of target_parameters"
        )


def _activate(original: ActivateAdapters) -> ActivateAdapters:
    @wraps(original)
    @contextmanager
    def activate(self: ParamWrapper, active_adapters: list[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in self.lora_A]
        experts = self.get_base_layer()
        if names:  # which may have been made before this module was imported
            check_adaptable(experts, self.parameter_name)
        if not names or not _takes(self, experts):
            with original(self, active_adapters):
                yield
            return
        with lora.lent(experts, self.parameter_name, Adapter.of([adapter_of(self, name) for name in names])):
            yield

    activate._fusible = True  # type: ignore[attr-defined]
    return activate


def _takes(wrapper: ParamWrapper, experts: ModelExperts) -> bool:
    """Whether the wrapped parameter belongs to experts that run here. Compiled code uses PEFT's sum instead."""
    config = getattr(experts, "config", None)
    if getattr(config, "_experts_implementation", None) != NAME or not hasattr(experts, "is_transposed"):
        return False
    if torch.compiler.is_compiling() or torch.nn.utils.parametrize.is_parametrized(experts):
        return False
    return lora.takes(experts, wrapper.parameter_name) and getattr(experts, wrapper.parameter_name).dim() == 3


def adapter_of(wrapper: ParamWrapper, name: str) -> Adapter:
    """PEFT's matrices by expert; its scaling goes into the second. Differentiable."""
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    experts = wrapper.num_experts
    a = a.reshape(experts, -1, a.shape[-1])  # [E, R, in of PEFT]
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)  # [E, out of PEFT, R]
    stored_as_out_in = not getattr(wrapper.get_base_layer(), "is_transposed", False)
    if stored_as_out_in != getattr(wrapper, "_did_swap_in_out_features", False):
        a, b = b.mT, a.mT  # this PEFT takes the first dimension of each matrix for its input
    dtype = wrapper.get_param().dtype  # adapters of a model in half precision are float32
    return Adapter(a.to(dtype), (b * wrapper.scaling[name]).to(dtype))


register()
