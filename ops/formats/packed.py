"""Weights that stay in 8 or 4 bits and are multiplied exactly in 16: how their bytes become values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .copies import PackedFormat
from .runs import decoded_in_runs

Unpack = Callable[[Tensor, Tensor], Tensor]
_UNPACKED: dict[PackedFormat, Unpack] = {}


def unpacks(format: PackedFormat) -> Callable[[Unpack], Unpack]:
    """Declares the function from the bytes and the scales of a format to its values."""

    def declared(function: Unpack) -> Unpack:
        _UNPACKED[format] = function
        return function

    return declared


def unpacked(data: Tensor, scales: Tensor, format: PackedFormat) -> Tensor:
    """bfloat16 [E, N, K], but for the factors of groups; a run of groups at a time."""
    (groups, rows, columns), unpack = data.shape, _UNPACKED[format]
    shape = groups, rows, columns * _values_in_byte(format)
    return decoded_in_runs(lambda run: unpack(data[run], scales[run]), shape, data, torch.bfloat16)


def _values_in_byte(format: PackedFormat) -> int:
    return 1 if format is PackedFormat.MXFP8 else 2
