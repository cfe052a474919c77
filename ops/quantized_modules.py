"""Weights that stay quantised, for inference: the bytes are the parameter, so that nothing can go stale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..fuser import ArgumentError
from .grouped_linear import GroupedLinear
from .quantized.copies import SCALES
from .quantized.recipe import Float8Block, Recipe
from .quantized_linear import is_power_of_two, refusal
from .quantized_weights import copies_of_weight


def quantize_(module: nn.Module, recipe: Recipe) -> nn.Module:
    """Quantises the weight of each :class:`GroupedLinear` of a module, in place, and returns the module.

    ``weight`` becomes a frozen parameter of e4m3 [E, N, K], and ``weight_scale_inv`` a buffer of its decode scales
    [E, ceil(N / 128), ceil(K / 128)], as checkpoints of quantised models have them. Linears multiply rows of 16 bits by
    it, which they quantise. Gradients of ``x``, the bias and scales flow as before. A weight that is quantised
    already stays as it is.

    Raises:
        ArgumentError: another recipe than ``Float8Block``; a linear with a weight for each expert.
    """
    linears = [each for each in module.modules() if isinstance(each, GroupedLinear) and not each.is_quantized]
    why = refusal(recipe, torch.bfloat16)
    if why is not None:
        raise ArgumentError(f"quantize_: {why}")
    for linear in linears:
        if linear.per_group["weight"]:
            raise ArgumentError(
                "quantize_: a weight for each expert is not quantised yet; use single_grouped_weight=True"
            )
    for linear in linears:
        _quantize(linear, recipe)
    return module


def holding(weight: Tensor, scales: Tensor, recipe: Float8Block) -> GroupedLinear:
    """A linear on bytes [E, N, K] and decode scales that somebody else owns, without a bias."""
    groups, rows, columns = weight.shape
    linear = GroupedLinear(groups, columns, rows, bias=False, device="meta", dtype=torch.bfloat16, recipe=recipe)
    linear.is_quantized = True
    linear._parameters["weight"] = weight  # type: ignore[assignment]
    linear.register_buffer(SCALES, scales)
    return linear


@torch.no_grad()
def _quantize(linear: GroupedLinear, recipe: Recipe) -> None:
    copies = copies_of_weight(linear.matrices("weight"), power_of_two=is_power_of_two(recipe), both=False)  # type: ignore[arg-type]
    linear.transposed_weight, linear.recipe, linear.is_quantized = False, recipe, True
    linear.weight = nn.Parameter(copies.data, requires_grad=False)
    linear.register_buffer(SCALES, copies.scales)
