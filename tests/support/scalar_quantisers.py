"""The quantisers' rule written out, block by block and in double precision, without torch's conversions.

A quotient or a product of two floats that is rounded to double and then to float is correctly rounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import inf, isfinite, isnan, nan
from struct import pack, unpack

import torch
from torch import Tensor

LARGEST = {
    torch.bfloat16: float.fromhex("0x1.FEp127"),
    torch.float16: 65504.0,
    torch.float32: float.fromhex("0x1.FFFFFEp127"),
}


def magnitudes(exponent_bits: int, mantissa_bits: int, codes: int) -> list[float]:
    """The values of the first codes of a small format."""
    bias, scale = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values = []
    for code in range(codes):
        exponent, mantissa = divmod(code, scale)
        normal = exponent > 0
        values.append((normal + mantissa / scale) * 2.0 ** (max(exponent, 1) - bias))
    return values


FINITE = {"e4m3": magnitudes(4, 3, 127), "e5m2": magnitudes(5, 2, 124), "e2m1": magnitudes(2, 1, 8)}
SIGN = {"e4m3": 128, "e5m2": 128, "e2m1": 8}


def nearest(value: float, format: str = "e4m3") -> int:
    """The code of the nearest value: ties to the even code, too large becomes the largest, NaN 0x7F."""
    if isnan(value):
        return 0x7F
    table, magnitude = FINITE[format], abs(value)
    above = min(bisect_left(table, magnitude), len(table) - 1)
    below = max(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = above if up < down or (up == down and above % 2 == 0) or magnitude > table[-1] else below
    sign = SIGN[format] if str(value).startswith("-") else 0
    return code + sign


def float32(value: float) -> float:
    """The nearest float."""
    try:
        return float(unpack("f", pack("f", value))[0])
    except OverflowError:
        return inf if value > 0 else -inf


def scales_of(amax: float, power_of_two: bool, dtype: torch.dtype, most: float = 448.0) -> tuple[float, float]:
    """The factor of a block, and the scale that is stored."""
    if not isfinite(amax):
        return 1.0, nan
    encode = 1.0 if amax == 0 else float32(most / amax)
    encode = LARGEST[dtype] if encode == inf else encode
    if power_of_two:
        encode = 2.0 ** (int(encode.hex().split("p")[1]))
    return encode, float32(1 / encode)


def block(x: Tensor, power_of_two: bool, format: str = "e4m3") -> tuple[Tensor, float]:
    """The bytes of a block of any shape, and its scale."""
    values = x.double().flatten().tolist()
    amax = nan if any(map(isnan, values)) else max(map(abs, values), default=0.0)
    encode, decode = scales_of(amax, power_of_two, x.dtype, FINITE[format][-1])
    codes = [nearest(float32(value * encode), format) for value in values]
    return torch.tensor(codes, dtype=torch.uint8).view(x.shape), decode


def spans(end: int, start: int = 0, size: int = 128) -> Iterator[slice]:
    """Blocks of a range, of which the last may be smaller."""
    return (slice(first, min(first + size, end)) for first in range(start, end, size))


def rows(x: Tensor, power_of_two: bool, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """Bytes [T, K] and scales [blocks, T] of blocks of 1 x 128."""
    data = torch.zeros(x.shape, dtype=torch.uint8)
    scales = torch.zeros(-(-x.shape[1] // 128), x.shape[0])
    for token in range(x.shape[0]):
        for b, span in enumerate(spans(x.shape[1])):
            data[token, span], scales[b, token] = block(x[token, span], power_of_two, format)
    return data, scales


def columns(x: Tensor, sizes: list[int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Bytes [used blocks, K, 128] and scales [used blocks, K] of blocks of 128 tokens of a group."""
    data, scales, start = [], [], 0
    for size in sizes:
        for span in spans(start + size, start):
            bytes, decodes = torch.zeros(x.shape[1], 128, dtype=torch.uint8), torch.zeros(x.shape[1])
            for k in range(x.shape[1]):
                bytes[k, : span.stop - span.start], decodes[k] = block(x[span, k], power_of_two)
            data.append(bytes)
            scales.append(decodes)
        start += size
    return torch.stack(data), torch.stack(scales)


def weight(matrix: Tensor, halves: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Bytes [N, K] and scales of blocks of 128 x 128 of one matrix, block by block of each half."""
    data, scales = torch.zeros(matrix.shape, dtype=torch.uint8), []
    size = matrix.shape[0] // halves
    for start in range(0, matrix.shape[0], size):
        for by_row in spans(start + size, start):
            line = []
            for by_column in spans(matrix.shape[1]):
                data[by_row, by_column], scale = block(matrix[by_row, by_column], power_of_two)
                line.append(scale)
            scales.append(line)
    return data, torch.tensor(scales)
