"""MXFP4: e2m1 with a power of two for each 32 values along the contraction; the weights of gpt-oss's checkpoints.

The scale is a sixth of the largest magnitude of a block, rounded up to a power of two, so that no value saturates.
Codes are the nearest, ties to the even one. Bytes and scales are in the order of those checkpoints. Values are exact in
bfloat16 for scales from 2 ** -126 on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .formats import cast_e2m1, cast_e8m0, from_e2m1, from_e8m0, pack, unpack
from .mxfp8 import MX_BLOCK
from .reference import amax_of, split

_LARGEST = 6.0


class MXFP4Data(NamedTuple):
    """Blocks of 32 along the last dimension.

    Attributes:
        data: uint8 [..., K / 2], two codes a byte, the first one in the low bits.
        scales: e8m0 [..., K / 32].
    """

    data: Tensor
    scales: Tensor


def quantize_weight(weight: Tensor) -> MXFP4Data:
    """``weight`` [..., K] of any float type. A block with inf or NaN has the largest scale, or NaN.

    Raises:
        ValueError: a K that is no multiple of 32.
    """
    if weight.shape[-1] % MX_BLOCK:
        raise ValueError(f"MXFP4 needs features that are multiples of {MX_BLOCK}, got {weight.shape[-1]}")
    blocks = split(weight, -1, MX_BLOCK)
    amax = amax_of(blocks, (-1,))
    scales = cast_e8m0(amax / torch.full_like(amax, _LARGEST))  # CUDA divides by a number through its reciprocal
    codes = cast_e2m1(blocks.float() * (torch.ones_like(amax) / from_e8m0(scales)))
    return MXFP4Data(pack(codes.flatten(-2)), scales.squeeze(-1))


def dequantize(quantised: MXFP4Data, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., K]."""
    values = split(from_e2m1(unpack(quantised.data)), -1, MX_BLOCK)
    return (values * from_e8m0(quantised.scales).unsqueeze(-1)).flatten(-2).to(dtype)
