"""MXFP4: e2m1 with a power of two for each 32 values along the contraction; the weights of gpt-oss's checkpoints.

The scale is a sixth of the largest magnitude of a block, rounded up to a power of two, so that no value saturates.
Codes are the nearest, ties to the even one. Bytes and scales are in the order of those checkpoints. Values are exact in
bfloat16 for scales from 2 ** -126 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .copies import Columns, PackedFormat, Rows, Weight
from .formats import cast_e2m1, cast_e8m0, from_e2m1, from_e8m0, pack, unpack
from .mxfp8 import MX_BLOCK
from .packed import unpacks
from .recipe import Recipe, register
from .reference import amax_of, split

_LARGEST = 6.0


@register
@dataclass(frozen=True)
class MXFP4(Recipe):
    """Weights in e2m1 with a power of two for each 32 values along the contraction, as gpt-oss's checkpoints have them.

    Rows and gradients are not quantised. Products are exact, in bfloat16.
    """

    quantises_tokens: ClassVar[bool] = False
    quantises_wgrad: ClassVar[bool] = False
    packed: ClassVar[PackedFormat] = PackedFormat.MXFP4
    has_one_copy: ClassVar[bool] = True
    values_in_byte: ClassVar[int] = 2

    def dtype_refusal(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.bfloat16:
            return None
        return f"MXFP4 multiplies bfloat16, not {str(dtype).removeprefix('torch.')}"

    def size_refusal(self, in_features: int, out_features: int) -> str | None:
        if in_features % MX_BLOCK:
            return f"MXFP4 needs in_features that are multiples of {MX_BLOCK}, got {in_features}"
        return None

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        raise ValueError("MXFP4 quantises weights, not tokens")

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        raise ValueError("MXFP4 quantises weights, not tokens")

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return quantize_weight(weight)

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        raise ValueError("MXFP4 has no columnwise copy of a weight: the rowwise one is read for all products")

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return dequantize(weight, torch.float32)


def quantize_weight(weight: Tensor) -> Weight:
    """``weight`` [..., K] of any float type. A block with inf or NaN has the largest scale, or NaN.

    uint8 [..., K / 2], two codes a byte, the first one in the low bits, with scales in e8m0 [..., K / 32].

    Raises:
        ValueError: K is not a multiple of 32.
    """
    if weight.shape[-1] % MX_BLOCK:
        raise ValueError(f"MXFP4 needs features that are multiples of {MX_BLOCK}, got {weight.shape[-1]}")
    blocks = split(weight, -1, MX_BLOCK)
    amax = amax_of(blocks, (-1,))
    scales = cast_e8m0(amax / torch.full_like(amax, _LARGEST))  # CUDA divides by a number through its reciprocal
    codes = cast_e2m1(blocks.float() * (torch.ones_like(amax) / from_e8m0(scales)))
    return Weight(pack(codes.flatten(-2)), scales.squeeze(-1))


def dequantize(quantised: Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., K]."""
    assert quantised.scales is not None
    values = split(from_e2m1(unpack(quantised.data)), -1, MX_BLOCK)
    return (values * from_e8m0(quantised.scales).unsqueeze(-1)).flatten(-2).to(dtype)


@unpacks(PackedFormat.MXFP4)
def unpacked(data: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., K], of the bytes of a weight that stays as it is."""
    return dequantize(Weight(data, scales))
