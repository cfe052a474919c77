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

from .copies import PackedFormat, Weight
from .decoding import Codes, Decoding
from .formats import cast_e2m1, cast_e8m0, from_e2m1, from_e8m0, pack
from .mxfp8 import MX_BLOCK
from .nibbles import looked_up, scaled_by_block, table_of_bytes
from .packed import unpacks
from .recipe import register
from .reference import amax_of, split
from .weight_only import WeightOnly

_LARGEST = 6.0
_NAN = 255  # the byte of a scale


@register
@dataclass(frozen=True)
class MXFP4(WeightOnly):
    """Weights in e2m1 with a power of two for each 32 values along the contraction: the format of gpt-oss's
    checkpoints.

    Rows and gradients are not quantised. Products are exact, in bfloat16.
    """

    packed: ClassVar[PackedFormat] = PackedFormat.MXFP4
    values_in_byte: ClassVar[int] = 2

    def size_refusal(self, in_features: int, out_features: int) -> str | None:
        if in_features % MX_BLOCK:
            return f"MXFP4 needs in_features that are multiples of {MX_BLOCK}, got {in_features}"
        return None

    def stored_refusal(self, weight: Weight) -> str | None:
        assert weight.scales is not None
        nans = int((weight.scales.view(torch.uint8) == _NAN).sum())
        return f"scales must be exponents below {_NAN}, which is NaN, and has it {nans} times" if nans else None

    @property
    def decoding(self) -> Decoding:
        return Decoding(Codes.E2M1, MX_BLOCK)

    def bits(self, in_features: int) -> float:
        return 4 + 8 / MX_BLOCK

    def quantize(self, weight: Tensor) -> Weight:
        return quantize_weight(weight)

    def values(self, weight: Weight) -> Tensor:
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
    codes = torch.arange(16, device=quantised.data.device)
    values = looked_up(quantised.data, table_of_bytes(from_e2m1(codes)))
    return scaled_by_block(values, from_e8m0(quantised.scales)).to(dtype)


@unpacks(PackedFormat.MXFP4, Decoding(Codes.E2M1, MX_BLOCK))
def unpacked(data: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., K], of the bytes of a weight that stays as it is."""
    return dequantize(Weight(data, scales))
