"""A scale for a block of 128 values of a row, or of 128 x 128 of a weight: :class:`~fusible.Float8Block`.

The rule is that of ``reference.py``. The bytes of a transposed weight are those of the weight, and so are its scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from . import reference
from .copies import Columns, Rows, Scaling, Transposition, Weight
from .float8 import Float8, tokens_of
from .recipe import register, transposed_bytes


@register
@dataclass(frozen=True)
class Float8Block(Float8):
    """e4m3 with scales of blocks: 1 x 128 values of a row, 128 x 128 of a weight.

    Attributes:
        scales: ``"power_of_two"``, or ``"float32"``: a smaller error if one value dominates a block.
        gradient: the format of incoming gradients, ``"e4m3"`` or ``"e5m2"``. e5m2 has twice the error, and a range that
            block scales do not need.
        wgrad: ``"float8"``, or ``"bfloat16"``: weight gradients are products of unquantised values.

    Raises:
        ValueError: another value.
    """

    scaling: ClassVar[Scaling] = Scaling.BLOCKS
    has_one_copy: ClassVar[bool] = True
    has_square_blocks: ClassVar[bool] = True

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        return reference.quantize_rows(x, self.is_power_of_two, self.format(is_gradient))

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        return reference.quantize_columns(x, split_sizes, self.is_power_of_two, self.format(is_gradient))

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return reference.quantize_weight(weight, parts, self.is_power_of_two, self.format(is_gradient))

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        data, scales, *_ = self.weight(weight, parts, is_gradient)
        return Weight(data.mT.contiguous(), scales)

    def row_values(self, rows: Rows, split_sizes: Tensor) -> Tensor:
        return reference.dequantize_rows(rows)

    def column_values(self, columns: Columns, split_sizes: Tensor, rows: int) -> Tensor:
        return tokens_of(reference.dequantize_columns(columns), split_sizes, rows)

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return reference.dequantize_weight(weight, parts)

    def transposed_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return self.weight_values(Weight(weight.data.mT, weight.scales), parts)

    def turned(
        self, weight: Weight, parts: int = 1, transpose: Callable[[Tensor], Tensor] = transposed_bytes
    ) -> Weight:
        return Weight(transpose(weight.data), weight.scales, turn=Transposition.VIEW).viewed()
