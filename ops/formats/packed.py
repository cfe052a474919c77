"""Weights that stay in 8 or 4 bits and are multiplied exactly in 16: of ``MXFP8``, ``MXFP4`` and ``NVFP4``."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch import Tensor

from . import mxfp4, mxfp8, nvfp4
from .mxfp4 import MXFP4Data
from .mxfp8 import MXRows


class PackedFormat(Enum):
    """How bytes and scales are read."""

    MXFP8 = "MXFP8"  # e4m3, and e8m0 for each 32 values
    NVFP4 = "NVFP4"  # e2m1, two to a byte, and e4m3 for each 16 values
    MXFP4 = "MXFP4"  # e2m1, two to a byte, and e8m0 for each 32 values

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is Python code


class PackedWeight(NamedTuple):
    """A weight [E, N, K] as a product of rows reads it.

    Attributes:
        data: bytes [E, N, K], or [E, N, K / 2] of two values each.
        scales: [E, N, blocks of K].
        amax: float32 [E], from which the product has a factor of each group; None: it has none.
    """

    data: Tensor
    scales: Tensor
    format: PackedFormat
    amax: Tensor | None = None


def unpacked(data: Tensor, scales: Tensor, format: PackedFormat) -> Tensor:
    """bfloat16 [E, N, K], but for the factors of groups."""
    if format is PackedFormat.MXFP8:
        return mxfp8.dequantize_rows(MXRows(data, scales))
    if format is PackedFormat.MXFP4:
        return mxfp4.dequantize(MXFP4Data(data, scales))
    return nvfp4.block_values(data, scales)
