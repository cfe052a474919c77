"""One scale for a row of an operand: :class:`~fusible.Float8Row`. The rule is that of ``reference.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .copies import Columns, Rows, Scaling, Weight
from .float8 import Float8, tokens_of
from .formats import E4M3, Format, cast
from .recipe import register, transposed_bytes
from .reference import amax_of, decode_scales, encode_scales, gather, largest_by_group, quantize_blocks, token_blocks


@register
@dataclass(frozen=True)
class Float8Row(Float8):
    """e4m3 with one scale for each row of an operand.

    Attributes:
        scales, gradient, wgrad: as for :class:`Float8Block`.
        fast_accumulation: products of rows and weights are summed entirely in the tensor core's short accumulator,
            which makes sums of one sign some percent too small. Otherwise sums are promoted every 128 values, as sums
            of weight gradients always are.

    Raises:
        ValueError: another value.
    """

    scaling: ClassVar[Scaling] = Scaling.ROWS
    fast_accumulation: bool = False

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        return quantize_rows(x, self.is_power_of_two, self.format(is_gradient))

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        return quantize_columns(x, split_sizes, self.is_power_of_two, self.format(is_gradient))

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return Weight(*quantize_rows(weight, self.is_power_of_two, self.format(is_gradient)))

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return self.weight(weight.mT.contiguous(), parts, is_gradient)

    def row_values(self, rows: Rows, split_sizes: Tensor) -> Tensor:
        return dequantize_rows(rows)

    def column_values(self, columns: Columns, split_sizes: Tensor, rows: int) -> Tensor:
        return tokens_of(dequantize_columns(columns, split_sizes, rows), split_sizes, rows)

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return dequantize_rows(weight)

    def column_operand(self, columns: Columns, split_sizes: Tensor, rows: int) -> Columns:
        assert columns.scales is not None
        return Columns(columns.data, columns.scales[token_blocks(split_sizes, rows).group])

    def turned(
        self, weight: Weight, parts: int = 1, transpose: Callable[[Tensor], Tensor] = transposed_bytes
    ) -> Weight:
        """The values are quantised again: the scale of a row cannot be factored out of a product over rows."""
        return self.transposed_weight(self.weight_values(weight))


def quantize_rows(x: Tensor, is_power_of_two: bool, format: Format = E4M3) -> Rows:
    """Bytes [..., K] and a scale for each row [...]."""
    data, scales = quantize_blocks(x, (-1,), is_power_of_two, format)
    return Rows(data, scales.squeeze(-1))


def quantize_columns(x: Tensor, split_sizes: Tensor, is_power_of_two: bool, format: Format = E4M3) -> Columns:
    """Bytes in blocks of tokens, as of :class:`Columns`, and a scale for each column of a group [E, K]."""
    blocks = token_blocks(split_sizes, x.shape[0])
    values = gather(x, blocks)
    amax = largest_by_group(amax_of(values, (1,)).squeeze(1), blocks.group, split_sizes.shape[0])
    encode = encode_scales(amax, is_power_of_two, format, x.dtype)
    data = cast(values.float() * encode[blocks.group].unsqueeze(1), format)
    return Columns(data.transpose(1, 2).contiguous(), decode_scales(encode, amax))


def dequantize_rows(rows: Rows | Weight) -> Tensor:
    """float32 [..., K]."""
    assert rows.scales is not None
    return rows.data.float() * rows.scales.unsqueeze(-1)


def dequantize_columns(columns: Columns, split_sizes: Tensor, rows: int) -> Tensor:
    """float32 [blocks, K, 128]."""
    assert columns.scales is not None
    group = token_blocks(split_sizes, rows).group
    return torch.mul(columns.data.float(), columns.scales[group].unsqueeze(-1))
