"""MXFP8: e4m3 with a power of two for each 32 values along the contraction, as Blackwell's tensor cores read it.

The scale is ``amax`` times the float nearest to 1 / 448, rounded up to a power of two. Values are multiplied by its
inverse, and rounded to the nearest. Bytes and scales are those of TransformerEngine. Both copies of a tensor are
quantised from its values, so they differ in more than their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .copies import BLOCK, BlockedColumns, QuantizedRows, QuantizedWeight
from .formats import E4M3, cast, cast_e8m0, from_e8m0
from .reference import amax_of, gather, scatter, split, token_blocks

MX_BLOCK = 32
_PER_BLOCK = BLOCK // MX_BLOCK
_OF_INFINITY, _OF_NAN = 0xFE, 0xFF  # the bytes of scales; that of the largest finite amax is 0xF7


class MXRows(NamedTuple):
    """Blocks of 32 along the last dimension.

    Attributes:
        data: e4m3 [..., K].
        scales: e8m0 [..., ceil(K / 32)].
    """

    data: Tensor
    scales: Tensor


class MXColumns(NamedTuple):
    """Blocks of 32 tokens of one group; the bytes lie as the tokens do.

    Attributes:
        data: e4m3 [T, K]; those of the tail are 0.
        scales: e8m0 [T // 32 + E, K], of which group g uses ceil(size_g / 32) rows, from the sum of those of the groups
            before it on.
    """

    data: Tensor
    scales: Tensor


def quantize_rows(x: Tensor) -> MXRows:
    """``x`` [..., K] of any float type."""
    data, scales = _quantize(split(x, -1, MX_BLOCK), -1)
    return MXRows(data.flatten(-2)[..., : x.shape[-1]].contiguous(), scales.squeeze(-1))


def quantize_columns(x: Tensor, split_sizes: Tensor) -> MXColumns:
    """``x`` [T, K] of any float type."""
    blocks = token_blocks(split_sizes, x.shape[0], MX_BLOCK)
    data, scales = _quantize(gather(x, blocks), 1)
    bytes = scatter(data.view(torch.uint8), blocks, x.shape[0])
    return MXColumns(bytes.view(E4M3.dtype), scales.squeeze(1))


def _quantize(x: Tensor, dim: int) -> MXRows:
    """Blocks that are all of a dimension, which stays in the scales with a size of 1."""
    scales = cast_e8m0(amax_of(x, (dim,)) * (1 / E4M3.max))
    return MXRows(cast(x.float() * _inverse(scales), E4M3), scales)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, float32, exactly; NaN of NaN."""
    return torch.ones((), device=scales.device) / from_e8m0(scales)


def dequantize_rows(rows: MXRows, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., K]; exact in bfloat16 for scales above 2 ** -125 and below 2 ** 120."""
    scales = from_e8m0(rows.scales).repeat_interleave(MX_BLOCK, -1)[..., : rows.data.shape[-1]]
    return (rows.data.float() * scales).to(dtype)


def dequantize_columns(columns: MXColumns, split_sizes: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[T, K], zero in the tail; exact as that of rows is."""
    rows = columns.data.shape[0]
    blocks = token_blocks(split_sizes, rows, MX_BLOCK)
    values = gather(columns.data.view(torch.uint8), blocks).view(E4M3.dtype).float()
    return scatter((values * from_e8m0(columns.scales).unsqueeze(1)).to(dtype), blocks, rows)


def regroup_rows(rows: MXRows) -> QuantizedRows:
    """Rows [T, K] as those of :class:`~fusible.Float8Block`: exact but for what becomes subnormal."""
    tokens = rows.data.shape[0]
    exponents = split(rows.scales.view(torch.uint8), -1, _PER_BLOCK)
    largest = exponents.amax(-1, keepdim=True)
    data = _shifted(rows.data, _shift(exponents, largest).flatten(1))
    scales = _block_scales(largest.squeeze(-1)).t()
    return QuantizedRows(data, torch.nn.functional.pad(scales, (0, -tokens % 4)).contiguous())


def regroup_columns(columns: MXColumns, split_sizes: Tensor) -> BlockedColumns:
    """Columns as those of :class:`~fusible.Float8Block`, exact as :func:`regroup_rows` is."""
    rows = columns.data.shape[0]
    blocks, small = token_blocks(split_sizes, rows), token_blocks(split_sizes, rows, MX_BLOCK)
    exponents = scatter(columns.scales.view(torch.uint8).unsqueeze(1).expand(-1, MX_BLOCK, -1), small, rows)
    exponents = gather(exponents, blocks)  # [blocks, 128, K], of each token
    largest = exponents.amax(1, keepdim=True)
    values = gather(columns.data.view(torch.uint8), blocks).view(E4M3.dtype).float() * _shift(exponents, largest)
    return BlockedColumns(cast(values, E4M3).transpose(1, 2).contiguous(), _block_scales(largest.squeeze(1)))


def regroup_weight(weight: MXRows, halves: int) -> QuantizedWeight:
    """Matrices [E, N, K] as those of :class:`~fusible.Float8Block`, exact as :func:`regroup_rows` is."""
    experts, rows = weight.data.shape[:2]
    exponents = weight.scales.view(torch.uint8).reshape(experts, halves, rows // halves, -1)
    blocks = split(split(exponents, -1, _PER_BLOCK), 2, BLOCK)  # [E, halves, blocks, 128, blocks, 4]
    largest = blocks.amax((3, 5), keepdim=True)
    factors = _shift(blocks, largest).flatten(4).flatten(2, 3)[:, :, : rows // halves].flatten(1, 2)
    data = _shifted(weight.data, factors)
    scales = _block_scales(largest.squeeze(5).squeeze(3)).flatten(1, 2)
    return QuantizedWeight(data, data.mT.contiguous(), scales)


def _block_scales(largest: Tensor) -> Tensor:
    """The scales of blocks as float32: NaN where MX blocks have that of infinity, whose bytes are those of 448.

    A product of bytes would take them for 448 times 2 ** 127, and give a finite number where weights are small.
    """
    return from_e8m0(torch.where(largest == _OF_INFINITY, _OF_NAN, largest))


def _shift(exponents: Tensor, largest: Tensor) -> Tensor:
    """float32: what bytes are multiplied by when their scale becomes the largest one; 0 for what would underflow."""
    exponent = (127 + exponents.int() - largest.int()).clamp(min=0)
    return (exponent << 23).view(torch.float32)


def _shifted(data: Tensor, factors: Tensor) -> Tensor:
    """Bytes [..., K] times a factor of each 32."""
    by_value = factors.repeat_interleave(MX_BLOCK, -1)[..., : data.shape[-1]]
    return cast(data.float() * by_value, E4M3)
