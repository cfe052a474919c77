"""The formats of elements and of scales, and how values become them. Conversions saturate, whatever the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """A format of 8 bits that values are rounded to.

    Attributes:
        max: the largest value, at which conversions saturate.
    """

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)
FORMATS = {format.name: format for format in (E4M3, E5M2)}
_NAN = 0x7F  # of both formats, whatever the sign


def cast(values: Tensor, format: Format) -> Tensor:
    """float32 to the nearest of the format, ties to even; what is too large becomes the largest, NaN the positive one.

    ``Tensor.to`` alone gives inf for a large value in e5m2, NaN in e4m3 before torch 2.12, and keeps the sign of NaN.
    """
    data = values.clamp(-format.max, format.max).to(format.dtype)
    data.view(torch.uint8).masked_fill_(values.isnan(), _NAN)
    return data


def cast_e8m0(values: Tensor) -> Tensor:
    """float32 amaxes, or other values that are not negative, to the next power of two up, as the byte of its exponent.

    0 becomes 2 ** -127, which is byte 0; inf 2 ** 127; NaN 255.
    """
    bits = values.float().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # a subnormal of up to 2 ** -127 has byte 0, every other number is rounded up to the next power
    up = (mantissa > 0) & (exponent < 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    byte = torch.where(values.isinf(), 0xFE, exponent + up.to(exponent.dtype))
    return torch.where(values.isnan(), 0xFF, byte).to(torch.uint8).view(torch.float8_e8m0fnu)


def power_of_two(scales: Tensor) -> Tensor:
    """float32 scales with their mantissas cleared: the next power of two toward zero; a subnormal becomes 0."""
    return (scales.view(torch.int32) & ~0x7FFFFF).view(torch.float32)


def from_e8m0(bytes: Tensor) -> Tensor:
    """The powers of two as float32; byte 0 is a subnormal, 255 NaN."""
    exponent = bytes.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 0xFF, 0x7FC00000, bits).view(torch.float32)


E2M1_MAX = 6.0
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between a code and the next; ties go to the even code


def cast_e2m1(values: Tensor) -> Tensor:
    """float32 to the nearest code of e2m1, ties to the even code, saturating at 6; codes in uint8. NaN becomes 6.

    TransformerEngine's conversion instruction does the same.
    """
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for index, tie in enumerate(_E2M1_TIES):
        beyond = magnitude > tie if index % 2 == 0 else magnitude >= tie
        code += beyond
    code = torch.where(values.isnan(), 7, code)
    return code | (torch.signbit(values) & ~values.isnan()).to(torch.uint8) << 3


def cast_e2m1_stochastic(values: Tensor, random: Tensor) -> Tensor:
    """float32 to one of the two codes beside, the nearer one more often: the mean is the value, up to 6.

    Args:
        random: a number for each value, from 0 inclusive to 1 exclusive.
    """
    table = from_e2m1(torch.arange(8, device=values.device))
    magnitude = values.abs().clamp(max=E2M1_MAX).nan_to_num(nan=E2M1_MAX)
    below = (torch.searchsorted(table, magnitude.contiguous(), right=True) - 1).clamp(max=6)
    fraction = (magnitude - table[below]) / (table[below + 1] - table[below])
    code = (below + (random < fraction)).to(torch.uint8)
    return code | (torch.signbit(values) & ~values.isnan()).to(torch.uint8) << 3


def from_e2m1(codes: Tensor) -> Tensor:
    """The values of codes, float32: bits moved to where float32 has them, and half a step below 1."""
    code = codes.to(torch.int32)
    sign, exponent, mantissa = (code & 8) << 28, (code >> 1) & 3, code & 1
    bits = torch.where(exponent > 0, exponent + 126 << 23 | mantissa << 22, mantissa * 0x3F000000)
    return (bits | sign).view(torch.float32)


def pack(codes: Tensor) -> Tensor:
    """Two codes of four bits a byte along the last dimension, the first one in the low bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The codes of :func:`pack`."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def product_factors(amax: Tensor | None, other: Tensor | None) -> Tensor | None:
    """float32 [E], by which the product of two operands is multiplied whose values lack the scales of their groups.

    Such a scale is ``amax / (6 * 448)``. None: an operand has none, so the product is right as it is.
    """
    if amax is None or other is None:
        return None
    return amax * other * (1 / (E2M1_MAX * E4M3.max) ** 2)
