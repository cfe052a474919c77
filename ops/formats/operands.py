"""What the products of a linear read under each recipe.

Kernels multiply bytes with scales of blocks of 128, as ``Float8Block`` has them, or with one scale for each whole row
of both operands. The scale of a group is that of all its rows, and in a weight gradient that of all its blocks. MXFP8
is regrouped to blocks if ``compute="fast"``. Else it is exact in bfloat16, as NVFP4 is but for the scales of groups,
and is multiplied there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import mxfp8, nvfp4, per_tensor
from .copies import (
    BackwardWeight,
    BlockedColumns,
    Columns,
    ColumnValues,
    QuantizedRows,
    Rows,
    RowValues,
    Scaling,
    TransposedWeight,
    WeightOperand,
)
from .formats import E4M3, FORMATS
from .mxfp8 import MXColumns, MXRows
from .packed import PackedFormat, PackedWeight, unpacked
from .recipe import MXFP4, MXFP8, NVFP4, Float8Block, Float8Row, Float8Tensor, Recipe
from .reference import Blocks, groups_of, token_blocks
from .schemes import Copy, scheme_of, without_group_scales


class TokenOperands(NamedTuple):
    """Of tokens; None for what nobody reads."""

    rows: Rows | None
    columns: Columns | None


class WeightOperands(NamedTuple):
    """Of a weight [E, N, K]: for the forward, and for the gradient of rows; None: nobody reads it.

    Attributes:
        backward: a :class:`Copy` is that of the forward, which :func:`turned` makes an operand of.
    """

    forward: WeightOperand
    backward: BackwardWeight | Copy | None


def format_refusal(recipe: Recipe, in_features: int, out_features: int) -> str | None:
    """Why a weight of this size has no copies under the recipe; None: it has."""
    if isinstance(recipe, MXFP4) and in_features % mxfp8.MX_BLOCK:
        return f"MXFP4 needs in_features that are multiples of {mxfp8.MX_BLOCK}, got {in_features}"
    if not isinstance(recipe, NVFP4):
        return None
    for name, size in (("in", in_features), ("out", out_features)):
        if size % nvfp4.NV_BLOCK:
            return f"NVFP4 needs {name}_features that are multiples of {nvfp4.NV_BLOCK}, got {size}"
    return None


def scaling_of(recipe: Recipe, is_gradient: bool) -> Scaling | None:
    """What has one scale in the copies that kernels make; None: they make none."""
    if not isinstance(recipe, Float8Block | Float8Row | Float8Tensor) or (is_gradient and recipe.gradient != "e4m3"):
        return None
    if isinstance(recipe, Float8Block):
        return Scaling.BLOCKS
    return Scaling.ROWS if isinstance(recipe, Float8Row) else Scaling.GROUPS


def of_tokens(
    recipe: Recipe,
    x: Tensor,
    split_sizes: Tensor,
    *,
    rows: bool,
    columns: bool,
    is_gradient: bool = False,
    encode: Tensor | None = None,
) -> TokenOperands:
    """The operands of tokens [T, K] that are wanted.

    Args:
        encode: float32 [E], what the values of a group are multiplied by, where that is known before.
    """
    if isinstance(recipe, Float8Tensor):
        return _of_groups(recipe, x, split_sizes, rows, columns, is_gradient, encode)
    scheme = scheme_of(recipe, is_gradient, stochastic=True)
    by_row = of_row_copy(recipe, scheme.rows(x, split_sizes), split_sizes) if rows else None
    if not columns:
        return TokenOperands(by_row, None)
    return TokenOperands(by_row, of_column_copy(recipe, scheme.columns(x, split_sizes), split_sizes, x.shape[0]))


def _of_groups(
    recipe: Float8Tensor,
    x: Tensor,
    split_sizes: Tensor,
    rows: bool,
    columns: bool,
    is_gradient: bool,
    encode: Tensor | None,
) -> TokenOperands:
    """Both orientations have the same bytes and the same scales of groups."""
    format = FORMATS[recipe.gradient] if is_gradient else E4M3
    data, scales = per_tensor.quantize_rows(x, split_sizes, recipe.scales == "power_of_two", format, encode)
    by_row = of_row_copy(recipe, Copy(data, scales), split_sizes) if rows else None
    if not columns:
        return TokenOperands(by_row, None)
    blocks = per_tensor.transposed_rows(Blocks(data, scales), split_sizes)
    return TokenOperands(by_row, of_column_copy(recipe, Copy(blocks, scales), split_sizes, x.shape[0]))


def of_row_copy(recipe: Recipe, copy: Copy, split_sizes: Tensor) -> Rows:
    """What a product of rows reads of a rowwise copy of tokens."""
    match recipe:
        case Float8Tensor():
            group = groups_of(split_sizes, copy.data.shape[0])
            return QuantizedRows(copy.data, F.pad(copy.scales, (0, 1), value=1.0)[group])
        case MXFP8(compute="exact"):
            return RowValues(mxfp8.dequantize_rows(MXRows(copy.data, copy.scales)))
        case MXFP8():
            return mxfp8.regroup_rows(MXRows(copy.data, copy.scales))
        case NVFP4():
            return RowValues(without_group_scales(copy), copy.amax)
    return QuantizedRows(copy.data, copy.scales)


def of_column_copy(recipe: Recipe, copy: Copy, split_sizes: Tensor, rows: int) -> Columns:
    """What a weight gradient reads of a columnwise copy of so many tokens."""
    match recipe:
        case Float8Tensor():
            by_block = copy.scales[token_blocks(split_sizes, rows).group].unsqueeze(-1)
            return BlockedColumns(copy.data, by_block.expand(copy.data.shape[:2]).contiguous())
        case Float8Row():
            group = token_blocks(split_sizes, rows).group
            return BlockedColumns(copy.data, copy.scales[group])
        case MXFP8(compute="exact"):
            columns = MXColumns(copy.data, copy.scales)
            return ColumnValues(mxfp8.dequantize_columns(columns, split_sizes), split_sizes)
        case MXFP8():
            return mxfp8.regroup_columns(MXColumns(copy.data, copy.scales), split_sizes)
        case NVFP4():
            values = without_group_scales(copy).transpose(1, 2).flatten(0, 1).contiguous()  # of one block a view
            return ColumnValues(values, nvfp4.filled_up(split_sizes), copy.amax)
    return BlockedColumns(copy.data, copy.scales)


def of_weight(recipe: Recipe, weight: Tensor, both: bool, encode: Tensor | None = None) -> WeightOperands:
    """The operands of a weight [E, N, K]; ``both``: also for the gradient of rows."""
    rowwise = rowwise_copy(recipe, weight, encode)
    if not both:
        return WeightOperands(of_rowwise(recipe, rowwise), None)
    if has_one_copy(recipe):
        return WeightOperands(of_rowwise(recipe, rowwise), turned(recipe, rowwise))
    columnwise = scheme_of(recipe).transposed_weight(weight, 1)
    return WeightOperands(of_rowwise(recipe, rowwise), of_columnwise(recipe, columnwise))


def rowwise_copy(recipe: Recipe, weight: Tensor, encode: Tensor | None = None) -> Copy:
    """The copy of a weight [E, N, K] that the forward reads."""
    if isinstance(recipe, Float8Tensor):
        return Copy(*per_tensor.quantize_weight(weight, recipe.scales == "power_of_two", encode=encode))
    return scheme_of(recipe).weight(weight, 1)


def has_one_copy(recipe: Recipe) -> bool:
    """Whether the transposed bytes of a weight are those of the weight, and its scales too."""
    return isinstance(recipe, Float8Block | Float8Tensor | MXFP4) or recipe == MXFP8("fast")


def of_rowwise(recipe: Recipe, copy: Copy, halves: int = 1) -> WeightOperand:
    """For the forward; regrouped so that no block spans two of the ``halves`` of the rows."""
    match recipe:
        case Float8Tensor():
            return WeightOperand(copy.data, copy.scales.unsqueeze(-1).expand(copy.data.shape[:2]))
        case MXFP8(compute="fast"):
            regrouped = mxfp8.regroup_weight(MXRows(copy.data, copy.scales), halves)
            return WeightOperand(regrouped.data, regrouped.scales)
        case MXFP8() | MXFP4() | NVFP4():
            packed = of_staying(recipe, copy)
            assert isinstance(packed, PackedWeight)
            return WeightOperand(unpacked(packed.data, packed.scales, packed.format), amax=packed.amax)
    return WeightOperand(copy.data, copy.scales)


def of_staying(recipe: Recipe, copy: Copy) -> WeightOperand | PackedWeight:
    """For the forward, of a weight that stays as it is: packed where its values are exact in 16 bits."""
    match recipe:
        case MXFP8(compute="exact"):
            return PackedWeight(copy.data, copy.scales, PackedFormat.MXFP8)
        case MXFP4():
            return PackedWeight(copy.data, copy.scales, PackedFormat.MXFP4)
        case NVFP4():
            return PackedWeight(copy.data, copy.scales, PackedFormat.NVFP4, copy.amax)
    return of_rowwise(recipe, copy)


def of_columnwise(recipe: Recipe, copy: Copy) -> WeightOperand:
    """For the gradient of rows, of a copy that was quantised for it."""
    if isinstance(recipe, MXFP8):  # lies as the weight does
        scales = copy.scales.view(torch.uint8).mT.contiguous().view(copy.scales.dtype)
        return WeightOperand(mxfp8.dequantize_rows(MXRows(copy.data.mT, scales)))
    return of_rowwise(recipe, copy)


def transposed_bytes(data: Tensor) -> Tensor:
    """The transposes [E, K, N] of matrices [E, N, K] of a dtype of 8 bits, by PyTorch."""
    return data.view(torch.uint8).mT.contiguous().view(data.dtype)


def turned(
    recipe: Recipe, rowwise: Copy, halves: int = 1, transpose: Callable[[Tensor], Tensor] = transposed_bytes
) -> WeightOperand:
    """For the gradient of rows, of the copy for the forward: its values, transposed.

    The scale of a row is no factor of such a product, so the values of ``Float8Row`` are quantised again.

    Args:
        transpose: does what :func:`transposed_bytes` does.
    """
    operand = of_rowwise(recipe, rowwise, halves)
    if isinstance(recipe, Float8Row):
        scheme = scheme_of(recipe)
        return of_columnwise(recipe, scheme.transposed_weight(scheme.weight_values(rowwise, 1), 1))
    if operand.scales is None:
        return operand._replace(data=operand.data.mT)
    data = transpose(operand.data)
    if isinstance(recipe, Float8Tensor):
        return of_rowwise(recipe, Copy(data, rowwise.scales))
    return TransposedWeight(data, operand.scales).operand
