"""The experts of transformers' FP8 checkpoints. They run on the model's own bytes and scales, without a copy.

The weights [E, N, K] and scales become those of a :class:`GroupedLinear` whose weight stays quantised. Rows are
quantised with the kind of scale that the checkpoint has: powers of two or float32.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ...fuser import ArgumentError, Sequential
from ...ops import Float8Block, Float8Weight, GroupedLinear
from ...ops.formats.copies import BLOCK, SCALES
from ...ops.modules.quantize import holding
from . import compiled
from .experts import autocasts, layer_around
from .gates import ModelExperts
from .stored_experts import kind_of

_ATTRIBUTE = "_fusible_float8"
_ROWS = (torch.bfloat16, torch.float16)


class Float8Experts(ModelExperts):
    """An experts module of an FP8 checkpoint; as :class:`ModelExperts`, a type alone."""

    activation_scheme: str
    block_size: tuple[int, int] | None


class Weights(NamedTuple):
    """The bytes of both linears, and their decode scales."""

    up: Tensor
    up_scales: Tensor
    down: Tensor
    down_scales: Tensor

    @classmethod
    def of(cls, experts: Float8Experts) -> Weights:
        """Reads the current weights and scales of ``experts``.

        Raises:
            ArgumentError: a tensor is missing.
        """
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        names = (up, f"{up}_scale_inv", "down_proj", "down_proj_scale_inv")
        tensors = [getattr(experts, name, None) for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is None:
                kind = type(experts).__name__
                raise ArgumentError(
                    f"{kind}: {name} is None; bytes have no meaning without scales; load both from the checkpoint"
                )
        return cls(*tensors)  # type: ignore[arg-type]


class Float8Container(NamedTuple):
    """A container and the tensors whose memory it reads.

    Both identity and address are compared, as loading may change either.
    """

    container: Sequential
    tensors: Weights
    addresses: tuple[int, ...]
    gate: object

    def holds_for(self, experts: Float8Experts, weights: Weights) -> bool:
        """Whether nothing has changed since it was built."""
        same = all([a is b for a, b in zip(self.tensors, weights, strict=True)])
        return same and self.addresses == _addresses(weights) and self.gate == _gate(experts)


def refusal(experts: Float8Experts, x: Tensor) -> str | None:
    """Why the experts cannot run here; None: they can."""
    if experts.activation_scheme != "dynamic":
        return f"its activation_scheme is {experts.activation_scheme!r}"
    if experts.block_size is None or tuple(experts.block_size) != (BLOCK, BLOCK):
        return f"its block_size is {experts.block_size}"
    if x.dtype not in _ROWS:
        return f"its hidden states are {x.dtype}"
    if autocasts(x):
        return "autocast is on"
    weights = Weights.of(experts)
    return _weight_refusal(*weights[:2]) or _weight_refusal(*weights[2:])


def _weight_refusal(weight: Tensor, scales: Tensor) -> str | None:
    if weight.dtype != torch.float8_e4m3fn:
        return f"its weights are {weight.dtype}"
    dtypes = Float8Weight.scale_dtypes
    if scales.dtype not in dtypes:
        return f"its scales are {scales.dtype}"
    expected = (weight.shape[0], *[-(-size // BLOCK) for size in weight.shape[1:]])
    return None if tuple(scales.shape) == expected else f"its scales have shape {list(scales.shape)}"


def run(experts: Float8Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The routed experts of a layer [T, H], in the dtype of ``x``."""
    if torch.compiler.is_dynamo_compiling():
        weights = Weights.of(experts)
        linears = compiled.QuantizedLinear(*weights[:2]), compiled.QuantizedLinear(*weights[2:])
        return compiled.float8_forward(experts, linears, x, top_k_index, top_k_weights)
    built = built_of(experts)
    container = built.container
    for name, scales in (("fc1", built.tensors.up_scales), ("fc2", built.tensors.down_scales)):
        if scales.dtype != torch.float32:  # written after the container was built
            container.get_submodule(name).get_buffer(SCALES).copy_(scales.detach())
    y: Tensor = container.forward(x, top_k_index=top_k_index, top_k_weights=top_k_weights)
    return y.to(x.dtype)


def built_of(experts: Float8Experts) -> Float8Container:
    """The container of the experts, rebuilt if weights, scales or gate have changed."""
    weights = Weights.of(experts)
    built: Float8Container | None = experts.__dict__.get(_ATTRIBUTE)
    if built is None or not built.holds_for(experts, weights):
        fc1, fc2 = _linear(*weights[:2]), _linear(*weights[2:])
        container = layer_around(experts, fc1, fc2)
        built = experts.__dict__[_ATTRIBUTE] = Float8Container(container, weights, _addresses(weights), _gate(experts))
    return built


def is_float8(experts: ModelExperts) -> TypeGuard[Float8Experts]:
    """Whether the experts are of an FP8 checkpoint."""
    return hasattr(experts, "activation_scheme") and hasattr(experts, "down_proj_scale_inv")


def existing(experts: Float8Experts) -> Float8Container | None:
    """The container that ran the experts; None before the first call."""
    built: Float8Container | None = experts.__dict__.get(_ATTRIBUTE)
    return built


def _linear(weight: Tensor, scales: Tensor) -> GroupedLinear:
    return holding(weight.detach(), scales.detach().float(), Float8Block(scales=kind_of(scales)))


def _addresses(weights: Weights) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in weights])


def _gate(experts: Float8Experts) -> tuple[object, ...]:
    """The values that select the op between the linears: the activation and the constants of the gate."""
    numbers = [experts.__dict__.get(name) for name in ("swiglu_alpha", "swiglu_limit", "limit", "gate_softcap")]
    return (experts.act_fn, experts.__dict__.get("up_softcap"), experts.__dict__.get("_apply_gate"), *numbers)
