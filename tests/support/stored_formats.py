"""Definitions of the formats of stored weights in float64, by integer arithmetic: nothing asks torch for a cast."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible import MXFP4, NF4, Float8Weight, Int4, NVFP4Weight
from fusible.ops.formats.copies import Weight
from fusible.ops.formats.weight_only import WeightOnly

FORMATS: tuple[WeightOnly, ...] = (
    *(MXFP4(), NVFP4Weight(), NVFP4Weight(2), NVFP4Weight(2, divides=True)),
    *(NF4(), NF4(nested=True), NF4(nested=True, sections=2), Int4(), Int4(128), Int4(64, zero_points=True)),
    *(Float8Weight(), Float8Weight("rows"), Float8Weight("tensor"), Float8Weight("tensor", 2)),
)
NORMAL_4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nibbles(data: Tensor, high_first: bool = False) -> Tensor:
    pair = (data.long() & 15, data.long() >> 4)
    return torch.stack(pair[::-1] if high_first else pair, -1).flatten(-2)


def e2m1(code: Tensor) -> Tensor:
    """Sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = torch.where(exponent > 0, (2 + mantissa) * 2.0 ** (exponent - 2).double(), mantissa * 0.5)
    return torch.where(code & 8 > 0, -magnitude, magnitude)


def e4m3(data: Tensor) -> Tensor:
    """Four bits of exponent with bias 7, three of mantissa; 0x7F and 0xFF are NaN."""
    byte = data.view(torch.uint8).long()
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = (8 + mantissa).double() * torch.pow(2.0, (exponent - 10).double())
    magnitude = torch.where(exponent > 0, normal, mantissa.double() * 2.0**-9)
    magnitude = torch.where(byte & 127 == 127, torch.nan, magnitude)
    return torch.where(byte & 128 > 0, -magnitude, magnitude)


def e8m0(data: Tensor) -> Tensor:
    byte = data.view(torch.uint8).double()
    return torch.where(byte == 255, torch.nan, torch.pow(2.0, byte - 127))


def numbers(scales: Tensor) -> Tensor:
    return e8m0(scales) if scales.dtype in (torch.uint8, torch.float8_e8m0fnu) else scales.double()


def by_block(values: Tensor, scales: Tensor) -> Tensor:
    return values * scales.repeat_interleave(values.shape[-1] // scales.shape[-1], -1)


def by_section(factors: Tensor, rows: int) -> Tensor:
    return factors.double().repeat_interleave(rows // factors.shape[1], 1).unsqueeze(-1)


def values(format: WeightOnly, weight: Weight) -> Tensor:
    """float64 [E, N, K]."""
    data, scales, third = weight.tensors
    assert data is not None
    assert scales is not None
    rows = data.shape[1]
    match format:
        case MXFP4():
            return by_block(e2m1(nibbles(data)), e8m0(scales))
        case NVFP4Weight(divides=divides):
            factors = by_section(third, rows)
            return by_block(e2m1(nibbles(data)), e4m3(scales) * (1 / factors if divides else factors))
        case NF4(sections=sections):
            codes = torch.tensor(NORMAL_4, dtype=torch.float64)[nibbles(data, high_first=True)]
            return by_block(codes, scales.double() if third is None else nested(scales, third, sections))
        case Int4(group=group):
            zero = torch.full((), 8.0).double()
            if third is not None:
                words = torch.stack([(third.long() & 0xFFFFFFFF) >> 4 * i & 15 for i in range(8)], 2)
                zero = words.flatten(1, 2)[:, :rows].double().repeat_interleave(group, -1)
            return by_block(nibbles(data).double() - zero, scales.double())
        case Float8Weight(scales="blocks"):
            factors = numbers(scales).repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)
            return e4m3(data) * factors[..., : data.shape[2]]
        case Float8Weight(scales="rows"):
            return e4m3(data) * numbers(scales).unsqueeze(-1)
        case _:
            return e4m3(data) * by_section(numbers(scales), rows)


def nested(codes: Tensor, joined: Tensor, sections: int) -> Tensor:
    """The scales of NF4 under double quantisation: float32 products and sums, as bitsandbytes' kernels round them."""
    scales = torch.empty(codes.shape, dtype=torch.float32)
    for group, (of_group, decoders) in enumerate(zip(codes, joined, strict=True)):
        parts = [each.chunk(sections) for each in (scales[group], of_group, decoders)]
        for to, bytes, row in zip(*parts, strict=True):
            absmax, table, offset = row[:-257], row[-257:-1], row[-1]
            flat = bytes.flatten()
            index = torch.arange(flat.numel()) // 256
            to.copy_((table[flat.long()] * absmax[index] + offset).view(bytes.shape))
    return scales.double()


def random_weight(format: WeightOnly, shape: tuple[int, int, int]) -> Weight:
    """Parts of random bytes, with scales that are no NaN."""
    like = format.weight(torch.randn(shape) * 0.02)
    data = torch.randint(0, 256, like.data.shape, dtype=torch.uint8)
    if like.data.dtype == torch.float8_e4m3fn:
        data = torch.where(data & 127 == 127, 0, data)
    return Weight(data.view(like.data.dtype), like.scales, like.amax)
