"""Weights that stay in 8 or 4 bits and are multiplied exactly in 16: how their bytes become values."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .copies import PackedFormat

Unpack = Callable[[Tensor, Tensor], Tensor]
_UNPACKED: dict[PackedFormat, Unpack] = {}


def unpacks(format: PackedFormat) -> Callable[[Unpack], Unpack]:
    """Declares the function from the bytes and the scales of a format to its values."""

    def declared(function: Unpack) -> Unpack:
        _UNPACKED[format] = function
        return function

    return declared


def unpacked(data: Tensor, scales: Tensor, format: PackedFormat) -> Tensor:
    """bfloat16 [E, N, K], but for the factors of groups."""
    return _UNPACKED[format](data, scales)
