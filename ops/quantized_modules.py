"""Weights that stay quantised, for inference: the bytes are the parameter, so that nothing can go stale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..fuser import ArgumentError
from ..fuser.stored_values import stores_values
from .grouped_linear import GroupedLinear
from .kernels.problem import stacked
from .quantized.copies import AMAX, SCALES, Weight
from .quantized.recipe import Recipe, gives_blocks, is_recipe
from .quantized_linear import refusal
from .quantized_weights import operands_of


def quantize_(module: nn.Module, recipe: Recipe) -> nn.Module:
    """Quantises the weight of each :class:`GroupedLinear` of a module, in place, and returns the module.

    ``weight`` becomes a frozen parameter of e4m3 [E, N, K], and ``weight_scale_inv`` a buffer of its decode scales: of
    ``Float8Block`` [E, ceil(N / 128), ceil(K / 128)], as checkpoints of quantised models have them, of ``Float8Row``
    [E, N], of ``Float8Tensor`` [E], of ``MXFP8`` e8m0 [E, N, ceil(K / 32)]. Under ``MXFP4`` and ``NVFP4`` it is uint8
    [E, N, K / 2], with scales of e8m0 [E, N, K / 32], or of e4m3 [E, N, K / 16] and a buffer ``weight_amax`` [E].
    Weights of one parameter an expert stay so, beside one buffer. Linears multiply rows of 16 bits by them, which they
    quantise, but under ``MXFP4``. Gradients of ``x``, the bias and
    scales flow as before. A weight that is quantised already stays as it is.

    Raises:
        ArgumentError: what is no recipe; one with delayed scales; sizes that it has no blocks for.
    """
    linears = [each for each in module.modules() if isinstance(each, GroupedLinear) and not each.is_quantized]
    for why in [_refusal(recipe, linear) for linear in linears]:
        if why is not None:
            raise ArgumentError(f"quantize_: {why}")
    for linear in linears:
        _quantize(linear, recipe)
    return module


def _refusal(recipe: Recipe, linear: GroupedLinear) -> str | None:
    if not is_recipe(recipe) or not recipe.quantises:
        return f"recipe must be one such as fusible.Float8Block(), got {recipe!r}"
    if recipe.steps is not None:
        return "a weight that stays as it is has no steps before; use Float8Tensor()"
    for name in linear.parameter_names("weight"):
        if not stores_values(kind := type(getattr(linear, name))):
            cure = "quantise before fully_shard, which then gathers bytes"
            return f"{name}: expected a plain tensor, got a {kind.__name__}; {cure}"
    return refusal(linear, recipe)


def holding(weight: Tensor, scales: Tensor, recipe: Recipe) -> GroupedLinear:
    """A linear on bytes [E, N, K] and decode scales that somebody else owns, without a bias."""
    groups, rows, columns = weight.shape
    linear = GroupedLinear(groups, columns, rows, bias=False, device="meta", dtype=torch.bfloat16, recipe=recipe)
    linear.is_quantized = True
    linear._parameters["weight"] = weight  # type: ignore[assignment]
    linear.register_buffer(SCALES, scales)
    return linear


@torch.no_grad()
def _quantize(linear: GroupedLinear, recipe: Recipe) -> None:
    copy = _copy_of(linear, recipe)
    linear.transposed_weight, linear.recipe, linear.is_quantized = False, recipe, True
    parts = copy.data if linear.per_group["weight"] else [copy.data]
    for name, part in zip(linear.parameter_names("weight"), parts, strict=True):
        linear.register_parameter(name, nn.Parameter(part, requires_grad=False))
    linear.register_buffer(SCALES, copy.scales)
    if copy.amax is not None:
        linear.register_buffer(AMAX, copy.amax)


def _copy_of(linear: GroupedLinear, recipe: Recipe) -> Weight:
    weight = linear.matrices("weight")
    return operands_of(recipe, weight, False).forward if gives_blocks(recipe) else recipe.weight(stacked(weight))
