"""Checks of the kernel that decodes stored weights, on a GPU or its emulation."""

from __future__ import annotations

import math
from functools import partial

import pytest
import stored_formats
import torch
from stored_formats import FORMATS
from torch import Tensor

from fusible import Float8Weight, Int4, NVFP4Weight
from fusible.ops.formats.copies import Weight
from fusible.ops.formats.weight_only import WeightOnly, in_words
from fusible.ops.kernels.hopper import decode
from fusible.ops.kernels.problems.decoding import WeightDecoding

from .quantize import assert_untouched, poisoned

Stored = tuple[WeightOnly, torch.dtype | None]
"""A format, and the dtype of its scales if it is not the format's own."""
STORED: tuple[Stored, ...] = (
    *((format, None) for format in FORMATS),
    *((Int4(32), dtype) for dtype in (torch.float32, torch.float16)),
    *((Int4(8), None), (Int4(64, zero_points=True), torch.float32)),
    *((Float8Weight(), dtype) for dtype in (torch.bfloat16, torch.float16, torch.float8_e8m0fnu)),
    (Float8Weight("rows"), torch.bfloat16),
)
IDS = [in_words(format) + ("" if dtype is None else f" {dtype}") for format, dtype in STORED]
SHAPES = [
    (3, 136, 384),
    (1, 2, 256),
    (2, 10, 704),  # the experts of published models: rows that end within a warp's turn, and within a block of 128
    (1, 130, 1856),
    (1, 6, 2880),
    (2, 4, 3072),
    (896, 2, 64),
]
GUARD = 256


def stored_weight(stored: Stored, shape: tuple[int, int, int]) -> Weight:
    """Parts of random bytes on the CPU; factors are powers of two, whose products with scales are exact."""
    format, dtype = stored
    weight = stored_formats.random_weight(format, shape)
    if dtype is not None:
        assert weight.scales is not None
        weight = weight._replace(scales=weight.scales.to(dtype))
    if isinstance(format, NVFP4Weight):
        assert weight.amax is not None
        weight = weight._replace(amax=torch.exp2(torch.arange(weight.amax.numel()) % 7 - 9.0).view(weight.amax.shape))
    return weight


def problem(format: WeightOnly, weight: Weight, out: Tensor) -> WeightDecoding:
    assert weight.scales is not None
    define = partial(format.decode_into, weight=weight)
    return WeightDecoding(*(weight.data, weight.scales, weight.amax, out), format.name, format.decoding, define)


def on(device: str, weight: Weight) -> Weight:
    return Weight(*[None if part is None else part.to(device) for part in weight.tensors])  # type: ignore[arg-type]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether numbers are the same, signs of zeros included; every NaN is alike."""
    bits = torch.equal(a.view(torch.int16)[~a.isnan()], b.view(torch.int16)[~a.isnan()])
    return bits and torch.equal(a.isnan(), b.isnan())


def check_decode(device: str, stored: Stored, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Bits of the definition in double precision, rounded to float32 and to 16 bits; nothing else is written."""
    if stored[0].size_refusal(shape[2], shape[1]) is not None:
        pytest.skip("a size that the format refuses")
    weight, count = stored_weight(stored, shape), math.prod(shape)
    memory = poisoned(2 * (GUARD + count + GUARD), device=device).view(dtype)
    out = memory[GUARD : GUARD + count].view(shape)
    decoded_into(out, stored[0], on(device, weight))
    assert same_bits(out.cpu(), stored_formats.values(stored[0], weight).float().to(dtype))
    assert_untouched(memory[:GUARD].view(torch.uint8), "bytes before the result")
    assert_untouched(memory[GUARD + count :].view(torch.uint8), "bytes behind the result")


def check_as_pytorch(device: str, stored: Stored, shape: tuple[int, int, int]) -> None:
    """Bits of what PyTorch computes, for factors and scales that round."""
    format, _ = stored
    weight = stored_formats.random_weight(format, shape)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    decoded_into(out, format, on(device, weight))
    assert same_bits(out.cpu(), format.decoded(weight, torch.bfloat16))


def decoded_into(out: Tensor, format: WeightOnly, weight: Weight) -> None:
    """By the kernel."""
    stated = problem(format, weight, out)
    assert decode.refusal(stated) is None, decode.refusal(stated)
    decode.run(stated)
