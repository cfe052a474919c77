"""One scale for a row of an operand: :class:`~fusible.Float8Row`. The rule is that of ``reference.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from .copies import RowWeight
from .formats import E4M3, Format, cast
from .reference import (
    Blocks,
    amax_of,
    decode_scales,
    encode_scales,
    gather,
    largest_by_group,
    quantize_blocks,
    token_blocks,
)


def quantize_rows(x: Tensor, is_power_of_two: bool, format: Format = E4M3) -> Blocks:
    """Bytes [..., K] and a scale for each row [...]."""
    data, scales = quantize_blocks(x, (-1,), is_power_of_two, format)
    return Blocks(data, scales.squeeze(-1))


def quantize_columns(x: Tensor, split_sizes: Tensor, is_power_of_two: bool, format: Format = E4M3) -> Blocks:
    """Bytes in blocks of tokens, as of :class:`BlockedColumns`, and a scale for each column of a group [E, K]."""
    blocks = token_blocks(split_sizes, x.shape[0])
    values = gather(x, blocks)
    amax = largest_by_group(amax_of(values, (1,)).squeeze(1), blocks.group, split_sizes.shape[0])
    encode = encode_scales(amax, is_power_of_two, format, x.dtype)
    data = cast(values.float() * encode[blocks.group].unsqueeze(1), format)
    return Blocks(data.transpose(1, 2).contiguous(), decode_scales(encode, amax))


def quantize_weight(weight: Tensor, is_power_of_two: bool, format: Format = E4M3) -> RowWeight:
    """Both copies of ``weight`` [E, N, K]; the transposed one is another quantisation."""
    transposed = quantize_rows(weight.mT.contiguous(), is_power_of_two, format)
    return RowWeight(*quantize_rows(weight, is_power_of_two, format), *transposed)


def dequantize_rows(rows: Blocks) -> Tensor:
    """float32 [..., K]."""
    return rows.data.float() * rows.scales.unsqueeze(-1)


def dequantize_columns(columns: Blocks, split_sizes: Tensor, rows: int) -> Tensor:
    """float32 [blocks, K, 128]."""
    group = token_blocks(split_sizes, rows).group
    return torch.mul(columns.data.float(), columns.scales[group].unsqueeze(-1))
