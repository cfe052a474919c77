"""The definition of every quantiser with scales in float32: kernels give the same bytes and the same scales.

In a block whose largest magnitude is ``amax``, and for a format whose largest value is ``max``::

    encode = max / amax, or 1 if amax is 0, or the largest of the input's type where that is inf
    encode = the next power of two below, if scales are powers of two
    byte   = nearest(value * encode)         ties to even, saturating
    scale  = 1 / encode, or NaN if amax is not finite, with encode = 1

Every operation is one of float32, correctly rounded. Nothing waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .copies import BLOCK, Columns, Rows, Weight
from .formats import E4M3, Format, cast, power_of_two


class TokenBlocks(NamedTuple):
    """The tokens of each group in blocks of one size.

    Attributes:
        tokens: int64 [blocks, size], the token at each place.
        valid: whether there is one; the rest of ``tokens`` is any token.
        group: int64 [blocks], the group of each block; of an unused block the last.
    """

    tokens: Tensor
    valid: Tensor
    group: Tensor


def quantize_blocks(
    x: Tensor, dims: tuple[int, ...], is_power_of_two: bool, format: Format = E4M3
) -> tuple[Tensor, Tensor]:
    """Bytes and the scales of blocks that span ``dims`` of ``x``, which have size 1 in the scales."""
    amax = amax_of(x, dims)
    encode = encode_scales(amax, is_power_of_two, format, x.dtype)
    return cast(x.float() * encode, format), decode_scales(encode, amax)


def amax_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """float32, the largest magnitude over ``dims``, which stay with a size of 1; NaN where there is one."""
    return x.abs().amax(dims, keepdim=True).float()


def encode_scales(amax: Tensor, is_power_of_two: bool, format: Format, dtype: torch.dtype) -> Tensor:
    """float32, what values of ``dtype`` are multiplied by.

    The quotient is one of tensors: CUDA turns a division by a number of Python into a multiplication.
    """
    encode = torch.full_like(amax, format.max) / amax
    encode = torch.where(encode.isinf(), torch.finfo(dtype).max, encode)
    encode = torch.where((amax == 0) | ~amax.isfinite(), 1.0, encode)
    return power_of_two(encode) if is_power_of_two else encode


def decode_scales(encode: Tensor, amax: Tensor) -> Tensor:
    """The factors that decode bytes; NaN, to stay visible, for a block with a value that is not finite."""
    return torch.where(amax.isfinite(), torch.ones_like(encode) / encode, torch.nan)


def quantize_rows(x: Tensor, is_power_of_two: bool, format: Format = E4M3) -> Rows:
    """Blocks of 1 x 128 of ``x`` [T, K]."""
    rows, features = x.shape
    data, scales = quantize_blocks(split(x, -1, BLOCK), (-1,), is_power_of_two, format)
    by_block = F.pad(scales.squeeze(-1).t(), (0, -rows % 4))
    return Rows(data.flatten(1)[:, :features].contiguous(), by_block.contiguous())


def quantize_columns(x: Tensor, split_sizes: Tensor, is_power_of_two: bool, format: Format = E4M3) -> Columns:
    """Blocks of 128 tokens of one group of ``x`` [T, K]. Unused blocks are zeros with scale 1."""
    values = gather(x, token_blocks(split_sizes, x.shape[0]))
    data, scales = quantize_blocks(values, (1,), is_power_of_two, format)
    return Columns(data.transpose(1, 2).contiguous(), scales.squeeze(1))


def token_blocks(split_sizes: Tensor, rows: int, size: int = BLOCK) -> TokenBlocks:
    """Where the tokens of each of T // size + E blocks are; sizes that reach past the rows are cut off."""
    ends = split_sizes.long().clamp(min=0).cumsum(0).clamp(max=rows)
    starts = F.pad(ends[:-1], (1, 0))
    last_blocks = ((ends - starts + size - 1) // size).cumsum(0)
    first_blocks = F.pad(last_blocks[:-1], (1, 0))
    block = torch.arange(rows // size + split_sizes.shape[0], device=split_sizes.device)
    group = torch.searchsorted(last_blocks, block, right=True).clamp(max=split_sizes.shape[0] - 1)
    first = starts[group] + (block - first_blocks[group]) * size
    tokens = first.unsqueeze(-1) + torch.arange(size, device=block.device)
    return TokenBlocks(tokens.clamp(max=max(0, rows - 1)), tokens < ends[group].unsqueeze(-1), group)


def gather(x: Tensor, blocks: TokenBlocks) -> Tensor:
    """The rows of ``x`` [T, K] in blocks, [blocks, size, K]; zeros where there is none."""
    values = x[blocks.tokens] if x.shape[0] else x.new_zeros((*blocks.tokens.shape, x.shape[1]))
    return torch.where(blocks.valid.unsqueeze(-1), values, x.new_zeros(()))


def scatter(values: Tensor, blocks: TokenBlocks, rows: int) -> Tensor:
    """Rows [T, K] from their blocks [blocks, size, K]; zeros in the tail."""
    places = torch.where(blocks.valid, blocks.tokens, rows).flatten()
    out = values.new_zeros((rows + 1, values.shape[-1]))
    return out.index_copy(0, places, values.flatten(0, 1))[:rows]


def groups_of(split_sizes: Tensor, rows: int) -> Tensor:
    """int64 [T], the group of each row; E in the tail."""
    ends = split_sizes.long().clamp(min=0).cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def largest_by_group(amax: Tensor, group: Tensor, groups: int) -> Tensor:
    """float32 [E, ...]: the largest of ``amax`` [N, ...] of each group [N]; 0 without any, NaN where there is one.

    Floats that are not negative are ordered as their bits are, NaN above all others; integers make it deterministic.
    """
    bits = amax.abs().view(torch.int32)
    index = group.view(-1, *[1] * (amax.dim() - 1)).expand_as(bits)
    most = bits.new_zeros((groups + 1, *amax.shape[1:])).scatter_reduce(0, index, bits, "amax")
    return most[:groups].view(torch.float32)


def quantize_weight(weight: Tensor, halves: int, is_power_of_two: bool, format: Format = E4M3) -> Weight:
    """Blocks of 128 x 128 of each half of each matrix of ``weight`` [E, N, K]."""
    experts, rows, features = weight.shape
    by_half = weight.reshape(experts, halves, rows // halves, features)
    blocks = split(split(by_half, -1, BLOCK), 2, BLOCK)  # [E, halves, blocks, 128, blocks, 128]
    data, scales = quantize_blocks(blocks, (3, 5), is_power_of_two, format)
    data = data.flatten(4).flatten(2, 3)[:, :, : rows // halves, :features].reshape(weight.shape)
    return Weight(data.contiguous(), scales.squeeze(5).squeeze(3).flatten(1, 2))


def split(x: Tensor, dim: int, size: int) -> Tensor:
    """A dimension as two: blocks of ``size``, and what is in one; the last one filled up with zeros."""
    dim %= x.dim()
    padding = -x.shape[dim] % size
    if padding:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, padding])
    return x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])


def dequantize_rows(rows: Rows) -> Tensor:
    """float32 [T, K]."""
    tokens, features = rows.data.shape
    assert rows.scales is not None
    if rows.scales.dim() == 1:
        return rows.data.float() * rows.scales.unsqueeze(-1)
    scales = rows.scales[:, :tokens].t().repeat_interleave(BLOCK, 1)[:, :features]
    return rows.data.float() * scales


def dequantize_columns(columns: Columns) -> Tensor:
    """float32 [blocks, K, 128]."""
    assert columns.scales is not None
    return columns.data.float() * columns.scales.unsqueeze(-1)


def dequantize_weight(weight: Weight, halves: int) -> Tensor:
    """float32 [E, N, K]."""
    assert weight.scales is not None
    return weight.data.float() * weight_scales(weight.scales, weight.data.shape, halves)


def weight_scales(scales: Tensor, shape: torch.Size, halves: int) -> Tensor:
    """The scale of each element of E matrices [E, N, K], or of each row [E, N, 1] where rows have one each."""
    if scales.dim() == 2:
        return scales.unsqueeze(-1)
    experts, rows, features = shape
    by_half = scales.reshape(experts, halves, scales.shape[1] // halves, scales.shape[2])
    by_row = by_half.repeat_interleave(BLOCK, 2)[:, :, : rows // halves].flatten(1, 2)
    return by_row.repeat_interleave(BLOCK, 2)[:, :, :features]
