"""Bytes of two codes of four bits as the values of a table."""

from __future__ import annotations

import torch
from torch import Tensor


def table_of_bytes(table: Tensor, high_first: bool = False) -> Tensor:
    """float32 [256, 2]: the two values of each byte, from those of the 16 codes; the first code is in the low bits."""
    bytes = torch.arange(256, device=table.device)
    low, high = table[bytes & 15], table[bytes >> 4]
    return torch.stack((high, low) if high_first else (low, high), -1)


def looked_up(data: Tensor, pairs: Tensor) -> Tensor:
    """[..., 2 n]: the values of bytes [..., n] in a table of :func:`table_of_bytes`."""
    values = pairs.index_select(0, data.reshape(-1).int())
    return values.view(*data.shape[:-1], 2 * data.shape[-1])


def scaled_by_block(values: Tensor, scales: Tensor) -> Tensor:
    """Values [..., K] times the scales [..., blocks] of equal blocks along the last dimension, in place."""
    blocks = values.view(*scales.shape, -1)
    return blocks.mul_(scales.unsqueeze(-1)).view(values.shape)
