"""Tokens that travel in 8 bits: e4m3 with a power of two for each 128 values, as rows of 16-bit numbers.

A row has its bytes first, then the exponents of its scales, and is padded to 16 bytes. So whatever moves rows of 16
bits moves it, in half the bytes. Its values are those of the rows that a linear under the same recipe would make of the
token, and bfloat16 holds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...fuser.errors import shown
from ..kernels.quantized import quantize_rows
from ..quantized.copies import BLOCK, ceil_blocks
from ..quantized.formats import E4M3, from_e8m0
from ..quantized.recipe import gives_blocks
from .settings import Settings

_ALIGNED = 16  # bytes


def refusal(recipe: Any, settings: Settings, transport: str) -> str | None:
    """Why tokens of a group cannot travel so; None: they can."""
    if not gives_blocks(recipe) or not recipe.is_power_of_two:
        return f"recipe must be Float8Block() with powers of two for scales, or None, got {shown(recipe)}"
    if settings.dtype != torch.bfloat16:
        return f"recipe needs a group of torch.bfloat16, which holds the values exactly, got {settings.dtype}"
    if transport != "collective":
        return f"recipe needs transport 'collective', got {transport!r}, whose memory has rows of 16 bits"
    return None


def width(hidden: int) -> int:
    """16-bit numbers of a row."""
    return -(-(hidden + ceil_blocks(hidden)) // _ALIGNED) * _ALIGNED // 2


def packed(x: Tensor) -> Tensor:
    """bfloat16 [T, :func:`width`], whose bits mean something else, of tokens [T, H] in bfloat16."""
    tokens, hidden = x.shape
    copies = quantize_rows(x, torch.full((1,), tokens, dtype=torch.int32, device=x.device), power_of_two=True)
    assert copies.rows is not None
    assert copies.rows.scales is not None
    exponents = copies.rows.scales.view(torch.int32)[:, :tokens] >> 23
    out = torch.zeros(tokens, 2 * width(hidden), dtype=torch.uint8, device=x.device)
    out[:, :hidden] = copies.rows.data.view(torch.uint8)
    out[:, hidden : hidden + ceil_blocks(hidden)] = exponents.mT
    return out.view(torch.bfloat16)


def unpacked(rows: Tensor, hidden: int) -> Tensor:
    """bfloat16 [Q, H], of rows that :func:`packed` gave."""
    data = rows.view(torch.uint8)
    scales = from_e8m0(data[:, hidden : hidden + ceil_blocks(hidden)]).repeat_interleave(BLOCK, 1)[:, :hidden]
    return (data[:, :hidden].view(E4M3.dtype).float() * scales).bfloat16()
