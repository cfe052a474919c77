"""What the copies of a tensor are under each recipe: how tokens and weights are quantised, and how they come back.

Tokens [T, K] are sorted by group, with the rows of each in ``split_sizes``. Their rowwise copy is contracted over K,
their columnwise copy over the tokens. A weight is [E, N, K]. Its columnwise copy is contracted over N, for the gradient
of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from . import mxfp4, mxfp8, nvfp4, per_row, per_tensor, reference
from .copies import BlockedColumns, QuantizedRows, QuantizedWeight
from .formats import E4M3, FORMATS, Format
from .mxfp4 import MXFP4Data
from .mxfp8 import MXColumns, MXRows
from .nvfp4 import NVFP4Data
from .random import new_seed
from .recipe import MXFP4, MXFP8, NVFP4, Float8Block, Float8Row, Float8Tensor, NoRecipe, Recipe
from .reference import Blocks

_Float8 = (Float8Block, Float8Row, Float8Tensor)


class Copy(NamedTuple):
    """One orientation of a tensor.

    Attributes:
        amax: float32 [E], where the scale of a group is computed from it; None: scales are all.
    """

    data: Tensor
    scales: Tensor
    amax: Tensor | None = None


class Scheme(Protocol):
    """The copies under one recipe; values come back as float32."""

    def rows(self, x: Tensor, split_sizes: Tensor) -> Copy:
        """The rowwise copy of tokens."""

    def columns(self, x: Tensor, split_sizes: Tensor) -> Copy:
        """The columnwise copy of tokens."""

    def weight(self, weight: Tensor, halves: int) -> Copy:
        """The rowwise copy of a weight; no block spans two of its ``halves``, where blocks have several rows."""

    def transposed_weight(self, weight: Tensor, halves: int) -> Copy:
        """The columnwise copy of a weight."""

    def row_values(self, copy: Copy, split_sizes: Tensor) -> Tensor:
        """[T, K]."""

    def column_values(self, copy: Copy, split_sizes: Tensor, rows: int) -> Tensor:
        """[T, K], zero in the tail."""

    def weight_values(self, copy: Copy, halves: int) -> Tensor:
        """[E, N, K]."""

    def transposed_values(self, copy: Copy, halves: int) -> Tensor:
        """[E, N, K]."""


def scheme_of(recipe: Recipe, is_gradient: bool = False, stochastic: bool = False) -> Scheme:
    """The copies under a recipe, of a gradient or of anything else.

    Args:
        stochastic: gradients may be rounded by random numbers, where the recipe says so; else to the nearest.

    Raises:
        ValueError: the recipe quantises nothing, or needs scales of steps before.
    """
    format = FORMATS[recipe.gradient] if is_gradient and isinstance(recipe, _Float8) else E4M3
    match recipe:
        case Float8Block():
            return BlockScheme(recipe.scales == "power_of_two", format)
        case Float8Row():
            return RowScheme(recipe.scales == "power_of_two", format)
        case Float8Tensor(delayed=None):
            return TensorScheme(recipe.scales == "power_of_two", format)
        case Float8Tensor():
            raise ValueError(f"{recipe} takes its scales from steps before: quantise with per_tensor.DelayedScales")
        case MXFP8():
            return MXScheme()
        case MXFP4():
            return MXFP4Scheme()
        case NVFP4():
            return NVScheme(recipe.hadamard, stochastic and is_gradient and recipe.stochastic_rounding)
        case NoRecipe():
            raise ValueError("NoRecipe quantises nothing")


def tokens_of(blocks: Tensor, split_sizes: Tensor, rows: int) -> Tensor:
    """Tokens [T, K] from their blocks [blocks, K, 128]."""
    return reference.scatter(blocks.transpose(1, 2), reference.token_blocks(split_sizes, rows), rows)


@dataclass(frozen=True)
class BlockScheme:
    """:class:`Float8Block`: :class:`QuantizedRows`, :class:`BlockedColumns` and :class:`QuantizedWeight`."""

    is_power_of_two: bool
    format: Format

    def rows(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*reference.quantize_rows(x, self.is_power_of_two, self.format))

    def columns(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*reference.quantize_columns(x, split_sizes, self.is_power_of_two, self.format))

    def weight(self, weight: Tensor, halves: int) -> Copy:
        copies = reference.quantize_weight(weight, halves, self.is_power_of_two, self.format)
        return Copy(copies.data, copies.scales)

    def transposed_weight(self, weight: Tensor, halves: int) -> Copy:
        data, scales, _ = self.weight(weight, halves)
        return Copy(data.mT.contiguous(), scales)

    def row_values(self, copy: Copy, split_sizes: Tensor) -> Tensor:
        return reference.dequantize_rows(QuantizedRows(copy.data, copy.scales))

    def column_values(self, copy: Copy, split_sizes: Tensor, rows: int) -> Tensor:
        return tokens_of(reference.dequantize_columns(BlockedColumns(copy.data, copy.scales)), split_sizes, rows)

    def weight_values(self, copy: Copy, halves: int) -> Tensor:
        return reference.dequantize_weight(QuantizedWeight(copy.data, None, copy.scales), halves)

    def transposed_values(self, copy: Copy, halves: int) -> Tensor:
        return self.weight_values(Copy(copy.data.mT, copy.scales), halves)


@dataclass(frozen=True)
class RowScheme:
    """:class:`Float8Row`."""

    is_power_of_two: bool
    format: Format

    def rows(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*per_row.quantize_rows(x, self.is_power_of_two, self.format))

    def columns(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*per_row.quantize_columns(x, split_sizes, self.is_power_of_two, self.format))

    def weight(self, weight: Tensor, halves: int) -> Copy:
        return Copy(*per_row.quantize_rows(weight, self.is_power_of_two, self.format))

    def transposed_weight(self, weight: Tensor, halves: int) -> Copy:
        return Copy(*per_row.quantize_rows(weight.mT.contiguous(), self.is_power_of_two, self.format))

    def row_values(self, copy: Copy, split_sizes: Tensor) -> Tensor:
        return per_row.dequantize_rows(Blocks(copy.data, copy.scales))

    def column_values(self, copy: Copy, split_sizes: Tensor, rows: int) -> Tensor:
        values = per_row.dequantize_columns(Blocks(copy.data, copy.scales), split_sizes, rows)
        return tokens_of(values, split_sizes, rows)

    def weight_values(self, copy: Copy, halves: int) -> Tensor:
        return per_row.dequantize_rows(Blocks(copy.data, copy.scales))

    def transposed_values(self, copy: Copy, halves: int) -> Tensor:
        return self.weight_values(copy, halves).mT


@dataclass(frozen=True)
class TensorScheme:
    """:class:`Float8Tensor`, with scales from the tensor itself; the columnwise copy has the same bytes."""

    is_power_of_two: bool
    format: Format

    def rows(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*per_tensor.quantize_rows(x, split_sizes, self.is_power_of_two, self.format))

    def columns(self, x: Tensor, split_sizes: Tensor) -> Copy:
        rows = per_tensor.quantize_rows(x, split_sizes, self.is_power_of_two, self.format)
        return Copy(per_tensor.transposed_rows(rows, split_sizes), rows.scales)

    def weight(self, weight: Tensor, halves: int) -> Copy:
        return Copy(*per_tensor.quantize_weight(weight, self.is_power_of_two, self.format))

    def transposed_weight(self, weight: Tensor, halves: int) -> Copy:
        data, scales, _ = self.weight(weight, halves)
        return Copy(data.mT.contiguous(), scales)

    def row_values(self, copy: Copy, split_sizes: Tensor) -> Tensor:
        return per_tensor.dequantize_rows(Blocks(copy.data, copy.scales), split_sizes)

    def column_values(self, copy: Copy, split_sizes: Tensor, rows: int) -> Tensor:
        scales = copy.scales[reference.token_blocks(split_sizes, rows).group]
        return tokens_of(copy.data.float() * scales.view(-1, 1, 1), split_sizes, rows)

    def weight_values(self, copy: Copy, halves: int) -> Tensor:
        return per_tensor.dequantize_weight(Blocks(copy.data, copy.scales))

    def transposed_values(self, copy: Copy, halves: int) -> Tensor:
        return self.weight_values(copy, halves).mT


@dataclass(frozen=True)
class MXScheme:
    """:class:`MXFP8`: every copy is a quantisation of its own, and lies as the tensor does."""

    def rows(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*mxfp8.quantize_rows(x))

    def columns(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*mxfp8.quantize_columns(x, split_sizes))

    def weight(self, weight: Tensor, halves: int) -> Copy:
        return Copy(*mxfp8.quantize_rows(weight))

    def transposed_weight(self, weight: Tensor, halves: int) -> Copy:
        data, scales = mxfp8.quantize_rows(weight.mT)
        return Copy(data.mT.contiguous(), scales.view(torch.uint8).mT.contiguous().view(scales.dtype))

    def row_values(self, copy: Copy, split_sizes: Tensor) -> Tensor:
        return mxfp8.dequantize_rows(MXRows(copy.data, copy.scales), torch.float32)

    def column_values(self, copy: Copy, split_sizes: Tensor, rows: int) -> Tensor:
        return mxfp8.dequantize_columns(MXColumns(copy.data, copy.scales), split_sizes, torch.float32)

    def weight_values(self, copy: Copy, halves: int) -> Tensor:
        return mxfp8.dequantize_rows(MXRows(copy.data, copy.scales), torch.float32)

    def transposed_values(self, copy: Copy, halves: int) -> Tensor:
        scales = copy.scales.view(torch.uint8).mT.contiguous().view(copy.scales.dtype)
        return mxfp8.dequantize_rows(MXRows(copy.data.mT, scales), torch.float32).mT


@dataclass(frozen=True)
class MXFP4Scheme:
    """:class:`MXFP4`: a weight has one copy, from which the gradient of rows takes values, and tokens have none."""

    def rows(self, x: Tensor, split_sizes: Tensor) -> Copy:
        raise ValueError("MXFP4 quantises weights, not tokens")

    def columns(self, x: Tensor, split_sizes: Tensor) -> Copy:
        raise ValueError("MXFP4 quantises weights, not tokens")

    def weight(self, weight: Tensor, halves: int) -> Copy:
        return Copy(*mxfp4.quantize_weight(weight))

    def transposed_weight(self, weight: Tensor, halves: int) -> Copy:
        raise ValueError("MXFP4 has no columnwise copy of a weight: the rowwise one is read for all products")

    def row_values(self, copy: Copy, split_sizes: Tensor) -> Tensor:
        raise ValueError("MXFP4 quantises weights, not tokens")

    def column_values(self, copy: Copy, split_sizes: Tensor, rows: int) -> Tensor:
        raise ValueError("MXFP4 quantises weights, not tokens")

    def weight_values(self, copy: Copy, halves: int) -> Tensor:
        return mxfp4.dequantize(MXFP4Data(copy.data, copy.scales), torch.float32)

    def transposed_values(self, copy: Copy, halves: int) -> Tensor:
        return self.weight_values(copy, halves).mT


@dataclass(frozen=True)
class NVScheme:
    """:class:`NVFP4`; values include the scale of the group."""

    is_transformed: bool
    is_stochastic: bool = False

    def rows(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*nvfp4.quantize_rows(x, split_sizes, self._seed(x)))

    def columns(self, x: Tensor, split_sizes: Tensor) -> Copy:
        return Copy(*nvfp4.quantize_columns(x, split_sizes, self.is_transformed, self._seed(x)))

    def _seed(self, x: Tensor) -> Tensor | None:
        return new_seed(x.device) if self.is_stochastic else None

    def weight(self, weight: Tensor, halves: int) -> Copy:
        return Copy(*nvfp4.quantize_weight(weight))

    def transposed_weight(self, weight: Tensor, halves: int) -> Copy:
        return Copy(*nvfp4.quantize_weight(weight.mT))

    def row_values(self, copy: Copy, split_sizes: Tensor) -> Tensor:
        values = without_group_scales(copy).float()
        factors = torch.nn.functional.pad(_group_scales(copy), (0, 1))
        return values * factors[reference.groups_of(split_sizes, values.shape[0])].unsqueeze(-1)

    def column_values(self, copy: Copy, split_sizes: Tensor, rows: int) -> Tensor:
        blocks = reference.token_blocks(split_sizes, rows, nvfp4.NV_BLOCK)
        values = without_group_scales(copy).float()
        if self.is_transformed:  # sums are exact in double, so they are the same on every device
            values = (values.double() @ nvfp4.hadamard(values.device).double().t()).float()
        values = values * _group_scales(copy)[blocks.group].view(-1, 1, 1)
        return reference.scatter(values.transpose(1, 2), blocks, rows)

    def weight_values(self, copy: Copy, halves: int) -> Tensor:
        return without_group_scales(copy).float() * _group_scales(copy).view(-1, 1, 1)

    def transposed_values(self, copy: Copy, halves: int) -> Tensor:
        return self.weight_values(copy, halves).mT


def _group_scales(copy: Copy) -> Tensor:
    assert copy.amax is not None
    return 1 / nvfp4.encode_scales(copy.amax)


def without_group_scales(copy: Copy) -> Tensor:
    """The values of a copy in NVFP4, bfloat16, but for the factor of each group."""
    assert copy.amax is not None
    return nvfp4.dequantize(NVFP4Data(copy.data, copy.scales, copy.amax))
