"""Tokens sent in 8 bits: e4m3 with a power of two for each 128 values, packed in rows of 16-bit numbers.

A row holds its bytes, then the exponents of its scales, padded to 16 bytes. Everything that moves 16-bit rows can move
it, at half the traffic. Its values are those that a linear under the same recipe would read, and bfloat16 represents
them exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...fuser.contract.errors import shown
from ..formats.copies import BLOCK, ceil_blocks
from ..formats.formats import E4M3, from_e8m0
from ..formats.recipe import Float8Block
from ..kernels.doors.quantized import quantize_rows
from .settings import Settings

_ALIGNED = 16  # bytes


def refusal(recipe: object, settings: Settings, transport: str) -> str | None:
    """The reason why tokens of a group cannot be sent in 8 bits, or None."""
    if not isinstance(recipe, Float8Block) or recipe.scales != "power_of_two":
        return f"recipe must be Float8Block() with powers of two for scales, or None, got {shown(recipe)}"
    if settings.dtype != torch.bfloat16:
        return f"recipe needs a group of torch.bfloat16, which holds the values exactly, got {settings.dtype}"
    if transport != "collective":
        return f"recipe needs transport 'collective', got {transport!r}, whose memory has rows of 16 bits"
    return None


def width(hidden: int) -> int:
    """The width of a packed row, in 16-bit numbers."""
    return -(-(hidden + ceil_blocks(hidden)) // _ALIGNED) * _ALIGNED // 2


def packed(x: Tensor) -> Tensor:
    """Packs tokens [T, H] in bfloat16 to [T, :func:`width`]; the result is bfloat16 in type only."""
    tokens, hidden = x.shape
    copies = quantize_rows(x, torch.full((1,), tokens, dtype=torch.int32, device=x.device), power_of_two=True)
    assert copies.rows is not None
    exponents = copies.rows.scales.view(torch.int32)[:, :tokens] >> 23
    out = torch.zeros(tokens, 2 * width(hidden), dtype=torch.uint8, device=x.device)
    out[:, :hidden] = copies.rows.data.view(torch.uint8)
    out[:, hidden : hidden + ceil_blocks(hidden)] = exponents.mT
    return out.view(torch.bfloat16)


def unpacked(rows: Tensor, hidden: int) -> Tensor:
    """Unpacks rows of :func:`packed` to bfloat16 [Q, H]."""
    data = rows.view(torch.uint8)
    scales = from_e8m0(data[:, hidden : hidden + ceil_blocks(hidden)]).repeat_interleave(BLOCK, 1)[:, :hidden]
    return (data[:, :hidden].view(E4M3.dtype).float() * scales).bfloat16()
