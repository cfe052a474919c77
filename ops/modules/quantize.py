"""Weights that stay quantised, for inference: the parameter holds the bytes, so nothing can become stale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...fuser import ArgumentError
from ...fuser.contract.stored_values import stores_values
from ..formats.copies import AMAX, SCALES, Weight
from ..formats.forms import form_of
from ..formats.recipe import Recipe, gives_blocks, is_recipe
from ..grouped.grouped_linear import GroupedLinear
from ..grouped.lora import GroupedLoRA
from ..kernels.problems.gemm import stacked
from ..quantized.linear import refusal
from ..quantized.weights import operands_of


def quantize_(module: nn.Module, recipe: Recipe) -> nn.Module:
    """Quantises the weight of each :class:`GroupedLinear` and :class:`GroupedLoRA` of a module, in place; returns the
    module.

    ``weight`` becomes a frozen parameter of bytes, and ``weight_scale_inv`` a buffer of decode scales: for
    ``Float8Block`` e4m3 [E, N, K] and [E, ceil(N / 128), ceil(K / 128)], as in checkpoints of quantised models, with
    [E, N] for ``Float8Row`` and [E] for ``Float8Tensor``. ``NVFP4`` also has a buffer ``weight_amax`` [E]. The
    documentation of quantised tensors lists the shapes of all recipes. With one parameter per expert, the parameters
    stay separate, beside one buffer. Linears quantise 16-bit rows and multiply them by the weights; weight-only formats
    do not quantise rows. A :class:`GroupedLoRA` takes weight-only formats and ``Float8Block``. Gradients of ``x``,
    biases, scales and adapters do not change. A weight that is quantised already stays as it is.

    Raises:
        ArgumentError: not a recipe, a recipe with delayed scales, sizes that its blocks do not divide, a weight that is
            not a plain tensor, or a recipe that does not fit adapters.
    """
    kinds = (GroupedLinear, GroupedLoRA)
    linears = [each for each in module.modules() if isinstance(each, kinds) and not each.is_quantized]
    for why in [_refusal(recipe, linear) for linear in linears]:
        if why is not None:
            raise ArgumentError(f"quantize_: {why}")
    for linear in linears:
        _quantize(linear, recipe)
    return module


def _refusal(recipe: Recipe, linear: GroupedLinear | GroupedLoRA) -> str | None:
    if not is_recipe(recipe) or not recipe.quantises:
        return f"recipe must be one such as fusible.Float8Block(), got {recipe!r}"
    if recipe.steps is not None:
        return "a weight that never changes has no earlier steps; use Float8Tensor()"
    for name in linear.parameter_names("weight"):
        if not stores_values(kind := type(getattr(linear, name))):
            cure = "quantise before fully_shard, which then gathers bytes"
            return f"{name}: expected a plain tensor, got a {kind.__name__}; {cure}"
    if isinstance(linear, GroupedLoRA) and recipe.quantises_tokens and not gives_blocks(recipe):
        return f"adapters need Float8Block, or a weight-only format such as NF4, got {recipe.name}"
    return refusal(linear, recipe)


def holding(weight: Tensor, scales: Tensor, recipe: Recipe) -> GroupedLinear:
    """Returns a linear without bias for bytes [E, N, K] and decode scales that the caller owns."""
    groups, rows, columns = weight.shape
    linear = GroupedLinear(groups, columns, rows, bias=False, device="meta", dtype=torch.bfloat16, recipe=recipe)
    linear.is_quantized = True
    linear._parameters["weight"] = weight  # type: ignore[assignment]
    linear.register_buffer(SCALES, scales)
    return linear


def hold(linear: GroupedLoRA, recipe: Recipe) -> GroupedLoRA:
    """Gives a linear without data a weight in a format, also without data; the caller fills the parts."""
    parts = form_of(recipe, linear.weight_shape)
    linear.recipe, linear.is_quantized, linear.transposed_weight = recipe, True, False
    linear.register_parameter("weight", nn.Parameter(parts.data, requires_grad=False))
    for name, part in zip((SCALES, AMAX), parts.decoders, strict=False):
        linear.register_buffer(name, part)
    return linear


@torch.no_grad()
def _quantize(linear: GroupedLinear | GroupedLoRA, recipe: Recipe) -> None:
    copy = _copy_of(linear, recipe)
    linear.transposed_weight, linear.recipe, linear.is_quantized = False, recipe, True
    parts = copy.data if linear.per_group["weight"] else [copy.data]
    for name, part in zip(linear.parameter_names("weight"), parts, strict=True):
        linear.register_parameter(name, nn.Parameter(part, requires_grad=False))
    linear.register_buffer(SCALES, copy.scales)
    if copy.amax is not None:
        linear.register_buffer(AMAX, copy.amax)


def _copy_of(linear: GroupedLinear | GroupedLoRA, recipe: Recipe) -> Weight:
    weight = linear.matrices("weight")
    return operands_of(recipe, weight, False).forward if gives_blocks(recipe) else recipe.weight(stacked(weight))
