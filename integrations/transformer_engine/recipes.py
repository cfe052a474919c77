"""Conversion of the recipe of TransformerEngine's ``autocast`` to one of ours, if all operands get the same values.

A setting that our recipes cannot express is an error, so experts never silently run in 16 bits under a recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...ops.formats.float8 import GradientFormat, ScaleKind
from ...ops.formats.mxfp8 import MXFP8
from ...ops.formats.nvfp4 import NVFP4
from ...ops.formats.per_block import Float8Block
from ...ops.formats.per_tensor import Float8Tensor
from ...ops.formats.recipe import Recipe

if TYPE_CHECKING:
    from transformer_engine.common.recipe import Recipe as EngineRecipe

_STATE = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # the second is older
_QUANTIZERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


def in_force() -> Recipe | None:
    """Our recipe for the enclosing ``autocast``; None outside one. Imports nothing.

    Raises:
        NotImplementedError: no recipe here equals it.
    """
    module = next((sys.modules[name] for name in _STATE if name in sys.modules), None)
    state = getattr(module, "FP8GlobalStateManager", None)
    return converted(state.get_fp8_recipe()) if state is not None and state.is_fp8_enabled() else None


def converted(recipe: EngineRecipe) -> Recipe:
    """Our recipe for one of ``transformer_engine.common.recipe``.

    Raises:
        NotImplementedError: none of ours equals it.
    """
    kind = type(recipe).__name__
    convert = _CONVERSIONS.get(kind)
    if convert is None:
        raise _refused(f"no recipe of fusible has the scales of TransformerEngine's {kind}")
    _require(recipe, backward_override=None)
    return convert(recipe)


def _block(recipe: EngineRecipe) -> Recipe:
    _require(recipe, x_block_scaling_dim=1, w_block_scaling_dim=2, grad_block_scaling_dim=1)
    return Float8Block(scales=_scales(recipe), gradient=_gradient(recipe))


def _tensor(recipe: EngineRecipe) -> Recipe:
    """Float8 with per-tensor scales.

    TransformerEngine may keep forward sums in the tensor core's short accumulator; we promote them.
    """
    return Float8Tensor(scales=_scales(recipe), gradient=_gradient(recipe))


def _mxfp8(recipe: EngineRecipe) -> Recipe:
    _require(recipe, margin=0, enable_2d_quantization=False)
    if _gradient(recipe) != "e4m3":
        raise _refused("fusible.MXFP8 has gradients in e4m3; give fp8='e4m3' in Megatron, Format.E4M3 elsewhere")
    return MXFP8()


def _nvfp4(recipe: EngineRecipe) -> Recipe:
    _require(recipe, disable_2d_quantization=False, row_scaled_activation=False, nvfp4_4over6="none")
    return NVFP4(stochastic_rounding=not recipe.disable_stochastic_rounding, hadamard=not recipe.disable_rht)


_CONVERSIONS: dict[str, Callable[[EngineRecipe], Recipe]] = {
    "Float8BlockScaling": _block,
    "Float8CurrentScaling": _tensor,
    "MXFP8BlockScaling": _mxfp8,
    "NVFP4BlockScaling": _nvfp4,
}


def _require(recipe: EngineRecipe, **expected: object) -> None:
    """Raises if a setting has another value; a setting missing in an older TransformerEngine counts as expected."""
    for name, value in expected.items():
        if (came := getattr(recipe, name, value)) != value:
            raise _refused(f"{type(recipe).__name__} with {name}={came!r}: fusible has it with {name}={value!r} only")


def _scales(recipe: EngineRecipe) -> ScaleKind:
    kinds = {name: getattr(recipe, name).power_2_scale for name in _QUANTIZERS}
    for name in _QUANTIZERS:
        if getattr(recipe, name).amax_epsilon:
            raise _refused(f"{name} has amax_epsilon={getattr(recipe, name).amax_epsilon}: fusible has none")
    if len(set(kinds.values())) > 1:
        raise _refused(f"fusible has one kind of scales for all operands, power_2_scale came as {kinds}")
    return "power_of_two" if kinds[_QUANTIZERS[0]] else "float32"


def _gradient(recipe: EngineRecipe) -> GradientFormat:
    return "e5m2" if recipe.fp8_format.name == "HYBRID" else "e4m3"


def _refused(why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{why}. Choose one of the recipes in docs/megatron.md, leave the recipe out for these experts, or uninstall "
        "fusible.integrations.transformer_engine"
    )
