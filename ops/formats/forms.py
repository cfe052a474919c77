"""The shapes and dtypes of weights that stay quantised, with their scales: what modules hold, and state dicts bring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...fuser import ArgumentError
from ...fuser.contract.torch_private import without_dispatch_modes
from .copies import AMAX, SCALES, Weight
from .recipe import RECIPES, Recipe

_NAMES = ("weight", SCALES, AMAX)
_EXACT_IN_FLOAT32 = (torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""The dtypes in which checkpoints store scales of float32."""


@lru_cache(maxsize=256)
def form_of(recipe: Recipe, shape: tuple[int, int, int]) -> Weight:
    """A weight [E, N, K] as it is kept under a recipe, without data.

    It serves calls of every mode, so it is made outside of the modes of the first.
    """
    with torch.inference_mode(False), without_dispatch_modes():
        return recipe.weight(torch.empty(shape, dtype=torch.bfloat16, device="meta"))


def misfit(recipe: Recipe, shape: tuple[int, int, int], copy: Weight) -> str | None:
    """The difference of a stored weight [E, N, K] from the recipe's form, or None."""
    for name, value, like in zip(_NAMES, copy.tensors, form_of(recipe, shape).tensors, strict=True):
        if value is None and like is None:
            continue
        if value is None or like is None:
            came = "is missing" if value is None else f"is {_named(value)}"
            return f"{name}: {came}, and {recipe.name} has {'none' if like is None else _named(like)}"
        if not _are_alike(value, like) and not (name == SCALES and _may_stay(recipe, value, like)):
            expected = f"expected {_named(like)}, under {recipe.name}"
            return f"{name}: {expected}, got {_named(value)}{_fix(value, like)}"
    return None


def check_decoders(recipe: Recipe, shape: tuple[int, int, int], decoders: Sequence[Tensor | None]) -> None:
    """Raises :class:`ArgumentError` where the scales of a weight that stays quantised do not fit."""
    scales, amax = (*decoders, None, None)[:2]
    if (why := misfit(recipe, shape, Weight(form_of(recipe, shape).data, scales, amax))) is not None:
        raise ArgumentError(f"{why}; a cast of the module also casts them, so quantise after the cast")


def widened(recipe: Recipe, shape: tuple[int, int, int], copy: Weight) -> Weight:
    """The copy of a weight [E, N, K], with float32 for numbers that a checkpoint has in less and the recipe in that."""
    form = form_of(recipe, shape)
    amax = None if copy.amax is None else _wide(copy.amax, form.amax)
    scales = copy.scales if copy.scales is None or recipe.scale_dtypes else _wide(copy.scales, form.scales)
    return Weight(copy.data, scales, amax)


def _wide(value: Tensor, like: Tensor | None) -> Tensor:
    becomes = like is not None and like.dtype == torch.float32 and value.dtype in _EXACT_IN_FLOAT32
    return value.float() if becomes else value


def recipe_of(shape: tuple[int, int, int], copy: Weight) -> Recipe | None:
    """One under which a weight [E, N, K] is kept as the copy is, all of which have the same values; None: none."""
    fitting = (r for r in _possible(shape) if misfit(r, shape, widened(r, shape, copy)) is None)
    return next(fitting, None)


def misfits(shape: tuple[int, int, int], copy: Weight) -> str:
    """Why there is no :func:`recipe_of` the copy: for each recipe whose weights are of its shape and dtype."""
    forms = {recipe: form_of(recipe, shape).data for recipe in _possible(shape)}
    whys = [misfit(recipe, shape, copy) for recipe, data in forms.items() if _are_alike(data, copy.data)]
    return "; or ".join(filter(None, whys)) or f"weight: no recipe keeps {list(shape)} as {_named(copy.data)}"


def _possible(shape: tuple[int, int, int]) -> list[Recipe]:
    """One recipe of each form that a weight of this shape can have; forms with the fewest scales come first.

    Switches of scales and gradients do not change the form.
    """
    recipes = [recipe() for recipe in RECIPES.values()]
    fitting = [recipe for recipe in recipes if recipe.size_refusal(shape[2], shape[1]) is None]
    return sorted(fitting, key=lambda recipe: _number_of_scales(form_of(recipe, shape)))


def _number_of_scales(form: Weight) -> tuple[int, int]:
    assert form.scales is not None
    return form.scales.dim(), form.scales.numel()


def _are_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _may_stay(recipe: Recipe, scales: Tensor, like: Tensor) -> bool:
    """Whether scales are of another dtype than the recipe's own that they keep."""
    return scales.shape == like.shape and scales.dtype in recipe.scale_dtypes


def _named(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def _fix(value: Tensor, like: Tensor) -> str:
    """How bytes that came without their dtype get it."""
    if value.dtype == torch.uint8 and like.dtype.itemsize == 1:
        return f"; if these are its bytes, give .view({like.dtype})"
    return ""
