"""Tokens sent in 8 bits: e4m3 with a power of two for each 128 values, packed in rows of 16-bit numbers.

A row holds its bytes, then the exponents of its scales, padded to 16 bytes. Everything that moves 16-bit rows can move
it, at half the traffic. Its values are those that a linear under the same recipe would read, and bfloat16 represents
them exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...fuser.contract.errors import shown
from ..formats.copies import Rows, ceil_blocks
from ..formats.formats import E4M3, from_e8m0
from ..formats.quantized_tokens import QuantizedTokens
from ..formats.recipe import Recipe
from ..kernels.doors.quantized import quantize_rows
from .settings import Settings

_ALIGNED = 16  # bytes


def refusal(recipe: Recipe | None, settings: Settings) -> str | None:
    """The reason why tokens of a group cannot be sent in 8 bits, or None."""
    if not QuantizedTokens.are_of(recipe):
        return f"recipe must be Float8Block() with powers of two for scales, or None, got {shown(recipe)}"
    if settings.dtype != torch.bfloat16:
        return f"recipe needs a group of torch.bfloat16, which holds the values exactly, got {settings.dtype}"
    return None


def width(hidden: int) -> int:
    """The width of a packed row, in 16-bit numbers."""
    return -(-(hidden + ceil_blocks(hidden)) // _ALIGNED) * _ALIGNED // 2


def packed(x: Tensor) -> Tensor:
    """Packs tokens [T, H] in bfloat16 to [T, :func:`width`]; the result is bfloat16 in type only."""
    tokens, hidden = x.shape
    copies = quantize_rows(x, torch.full((1,), tokens, dtype=torch.int32, device=x.device), power_of_two=True)
    assert copies.rows is not None
    assert copies.rows.scales is not None
    exponents = copies.rows.scales.view(torch.int32)[:, :tokens] >> 23
    out = torch.zeros(tokens, 2 * width(hidden), dtype=torch.uint8, device=x.device)
    out[:, :hidden] = copies.rows.data.view(torch.uint8)
    out[:, hidden : hidden + ceil_blocks(hidden)] = exponents.mT
    return out.view(torch.bfloat16)


def arrived(rows: Tensor, hidden: int) -> QuantizedTokens:
    """The rows [Q, H] in rows of :func:`packed`: bytes where they are, scales laid out as products read them."""
    data = rows.view(torch.uint8)
    exponents = data[:, hidden : hidden + ceil_blocks(hidden)]
    scales = nn.functional.pad(from_e8m0(exponents).t(), (0, -rows.shape[0] % 4)).contiguous()
    return QuantizedTokens(Rows(data[:, :hidden].view(E4M3.dtype), scales), exponents)
