"""Weights that stay in 8 or 4 bits and are multiplied exactly in 16: how their bytes become values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .copies import PackedFormat
from .decoding import Decoding
from .runs import decode_in_runs

Unpack = Callable[[Tensor, Tensor], Tensor]
_UNPACKED: dict[PackedFormat, Unpack] = {}
DECODINGS: dict[PackedFormat, Decoding] = {}
"""The formats in the terms of kernels, without the factors of groups."""


def unpacks(format: PackedFormat, decoding: Decoding) -> Callable[[Unpack], Unpack]:
    """Declares the function from the bytes and the scales of a format to its values, and what kernels do instead."""

    def declared(function: Unpack) -> Unpack:
        _UNPACKED[format], DECODINGS[format] = function, decoding
        return function

    return declared


def new_unpacked(data: Tensor, format: PackedFormat) -> Tensor:
    """Memory for the values, bfloat16 [E, N, K], but for the factors of groups."""
    groups, rows, columns = data.shape
    return data.new_empty((groups, rows, columns * values_in_byte(format)), dtype=torch.bfloat16)


def values_in_byte(format: PackedFormat) -> int:
    return 1 if format is PackedFormat.MXFP8 else 2


def unpack_into(out: Tensor, data: Tensor, scales: Tensor, format: PackedFormat) -> None:
    """Writes the values, a run of groups at a time."""
    unpack = _UNPACKED[format]
    decode_in_runs(lambda run: unpack(data[run], scales[run]), out)
