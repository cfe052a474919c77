"""The common part of 8-bit formats with float32 scales: their switches, and e4m3 or e5m2 for gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from .copies import Columns, Rows, Scaling, Weight
from .formats import E4M3, FORMATS, Format
from .recipe import RECIPES, Recipe, check_choice, check_flag
from .reference import scatter, token_blocks

ScaleKind = Literal["power_of_two", "float32"]
GradientFormat = Literal["e4m3", "e5m2"]
WgradFormat = Literal["float8", "bfloat16"]


@dataclass(frozen=True)
class Float8(Recipe):
    """Bytes with scales in float32. Kernels quantise to e4m3, and multiply what they have quantised as it is.

    Attributes:
        scales, gradient, wgrad: see :class:`fusible.Float8Block`.
    """

    scales: ScaleKind = "power_of_two"
    gradient: GradientFormat = "e4m3"
    wgrad: WgradFormat = "float8"

    def __post_init__(self) -> None:
        for name, kind in (("scales", ScaleKind), ("gradient", GradientFormat), ("wgrad", WgradFormat)):
            check_choice(self, name, get_args(kind))
        check_flag(self, "fast_accumulation")

    @property
    def is_power_of_two(self) -> bool:
        return self.scales == "power_of_two"

    @property
    def quantises_wgrad(self) -> bool:
        return self.wgrad == "float8"

    def kernels(self, is_gradient: bool) -> Scaling | None:
        return None if is_gradient and self.gradient != "e4m3" else self.scaling

    def row_operand(self, rows: Rows, split_sizes: Tensor) -> Rows:
        return rows

    def column_operand(self, columns: Columns, split_sizes: Tensor, rows: int) -> Columns:
        return columns

    def weight_operand(self, weight: Weight, parts: int = 1) -> Weight:
        return weight

    def transposed_operand(self, weight: Weight) -> Weight:
        return weight

    def format(self, is_gradient: bool) -> Format:
        """The format that values are rounded to."""
        return FORMATS[self.gradient] if is_gradient else E4M3


def definition(scaling: Scaling, is_power_of_two: bool) -> Recipe:
    """The recipe that defines the results of kernels with such scales, in float32."""
    recipe: Any = next(recipe for recipe in RECIPES.values() if recipe.scaling is scaling)
    defines: Recipe = recipe(scales="power_of_two" if is_power_of_two else "float32")
    return defines


def tokens_of(blocks: Tensor, split_sizes: Tensor, rows: int) -> Tensor:
    """Tokens [T, K] from their blocks [blocks, K, 128]."""
    return scatter(blocks.transpose(1, 2), token_blocks(split_sizes, rows), rows)
