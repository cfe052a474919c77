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

from .hugging_face import lora
from .hugging_face.gates import ModelExperts
from .hugging_face.left_in_16_bits import CURE, are_meant, is_left
from .hugging_face.lora import Adapter
from .hugging_face.stored_experts import CAST, Stored, stored_of, weight_decoded_by

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
        wrapper.get_param, wrapper.merge = _get_param(wrapper.get_param), _merge(wrapper.merge)


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
        check_not_left_in_16_bits(inner, parameter_name)
        check_not_shared(inner, parameter_name)
        original(self, base_layer, adapter_name, parameter_name, *args, **kw)

    return init


def _get_param(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """PEFT reads shape, dtype and device of a parameter; bytes show those of their decoded values."""

    @wraps(original)
    def get_param(self: Any) -> Any:
        stored = _adapted_bytes(self.get_base_layer(), self.parameter_name)
        return original(self) if stored is None else stored.stand_in(self.get_base_layer())

    return get_param


def _merge(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def merge(self: Any, *args: Any, **kwargs: Any) -> None:
        stored = _adapted_bytes(self.get_base_layer(), self.parameter_name)
        if stored is not None:
            raise ValueError(
                f"fusible: {self.parameter_name} is stored as {stored.recipe.name}, whose steps are larger than an "
                "adapter's changes: merged, it would be lost. Keep the adapter beside the model, or write merged "
                "weights in 16 bits, layer by layer: fusible.integrations.export.export_merged(model, folder)"
            )
        original(self, *args, **kwargs)

    return merge


def _adapted_bytes(experts: Any, name: str) -> Stored | None:
    """The meaning of the bytes of a parameter, if experts run here on them."""
    return stored_of(experts, name) if _runs_here(experts) else None


def _runs_here(experts: Any) -> bool:
    config = getattr(experts, "config", None)
    return getattr(config, "_experts_implementation", None) == NAME


def check_adaptable(module: Any, name: str) -> None:
    """Checks that PEFT can adapt a parameter, whichever implementation runs the module.

    Raises:
        ValueError: the parameter is what decodes a weight, or bytes which ``"fusible"`` does not read or something else
            runs.
        PEFT would add adapters to the bytes, which get no gradient in transformers: nothing is trained, and the output
            hardly changes.
    """
    parameter = getattr(module, name, None)
    if not isinstance(parameter, Tensor):
        return
    weight = weight_decoded_by(name)
    if weight is not None and isinstance(getattr(module, weight, None), Tensor):
        raise ValueError(
            f"{type(module).__name__}.{name}: PEFT cannot adapt what decodes {weight}: nothing would be trained. Leave "
            f"{name!r} out of target_parameters"
        )
    if parameter.dtype.itemsize != 1:
        check_not_cast(module, name)
        return
    stored = stored_of(module, name)
    if stored is not None and _runs_here(module):
        return
    otherwise = f"leave {name!r} out of target_parameters"
    cure = f"Load a checkpoint of the model in 16 bits, or {otherwise}"
    if parameter.is_floating_point():
        call = "from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True))"
        cure = f"Load the model in 16 bits, as {call} does, or {otherwise}"
    if stored is not None:
        cure = 'Load the model with experts_implementation="fusible", which trains adapters beside bytes'
    raise ValueError(
        f"{type(module).__name__}.{name}: PEFT cannot adapt {parameter.dtype} with scales beside it: the adapters "
        f"would be added to the bytes, and get no gradients. {cure}"
    )


def check_not_cast(module: Any, name: str) -> None:
    """Checks that a parameter in 16 bits or more is not FP8 that was cast, whose codes have no meaning without scales.

    Raises:
        ValueError: it is.
    """
    if isinstance(getattr(module, f"{name}_scale_inv", None), Tensor):
        kind, dtype = type(module).__name__, getattr(module, name).dtype
        raise ValueError(f"{kind}.{name}: was torch.float8_e4m3fn and is {dtype}: {CAST}")


def check_not_shared(module: Any, name: str) -> None:
    """Checks that a rank has all experts that an adapter would be for.

    Raises:
        ValueError: ranks share the experts. PEFT would make adapters for all experts on each rank, and add them to the
            experts of one.
    """
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(
            f"{type(module).__name__}.{name}: PEFT cannot adapt experts that ranks share (ep_size): its adapters are "
            "whole, and the parameter is the part of one rank. Load the model without ep_size, or leave "
            f"{name!r} out of target_parameters"
        )


def check_not_left_in_16_bits(module: nn.Module, name: str) -> None:
    """Checks that a parameter of a quantised model is not in 16 bits or more because its quantiser skipped it silently.

    Raises:
        ValueError: it is, and the settings of the quantisation do not name experts among what they leave.
    """
    settings = getattr(getattr(module, "config", None), "quantization_config", None)
    method, parameter = getattr(settings, "quant_method", None), getattr(module, name, None)
    if method is None or not isinstance(parameter, Tensor) or not is_left(parameter) or are_meant(settings):
        return
    raise ValueError(
        f"fusible: {type(module).__name__}.{name} is {parameter.dtype}, {parameter.nbytes / 1e9:.3g} GB, although the "
        f"model is quantised by {getattr(method, 'value', method)}, which leaves these experts as they are. {CURE}, "
        "or of the loaded model.config"
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
    if not _runs_here(experts):
        return False
    if stored_of(experts, wrapper.parameter_name) is not None:
        return True
    if not hasattr(experts, "is_transposed"):
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
    return Adapter(*_of_parameter_dtype(wrapper, a, b * wrapper.scaling[name]))


def _of_parameter_dtype(wrapper: Any, *factors: Tensor) -> tuple[Tensor, ...]:
    """Casts the adapters to the dtype of the parameter's values: adapters in half precision are float32 in PEFT."""
    dtype = wrapper.get_param().dtype
    return tuple([factor.to(dtype) for factor in factors])


register()
