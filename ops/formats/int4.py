"""Int4 in groups: integers from -8 to 7, or from 0 to 15 about a zero point, with a scale for each group of a row.

The bytes are those of compressed-tensors' ``pack-quantized``: eight codes to an int32, the first one in its low bits, a
code being an integer plus 8. Zero points are packed likewise, but along the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .copies import Weight
from .decoding import Codes, Decoding
from .nibbles import looked_up, scaled_by_block, table_of_bytes
from .recipe import check_flag, register
from .reference import split
from .weight_only import SCALE_DTYPES, WeightOnly

_OFFSET = 8
_CODES_IN_WORD = 8


@register
@dataclass(frozen=True)
class Int4(WeightOnly):
    """Weights in four bits with a scale for each group of values of a row, as compressed-tensors stores them.

    Attributes:
        group: the number of values that share a scale, a multiple of 8; 32 in Kimi-K2, 128 in many other models.
        zero_points: whether each group also has a zero point, int32 [E, ceil(N / 8), K / group].

    Raises:
        ValueError: another value.
    """

    group: int = 32
    zero_points: bool = False
    values_in_byte: ClassVar[int] = 2
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = SCALE_DTYPES

    def __post_init__(self) -> None:
        check_flag(self, "zero_points")
        if not isinstance(self.group, int) or self.group < 1 or self.group % _CODES_IN_WORD:
            raise ValueError(f"Int4: group must be a multiple of {_CODES_IN_WORD}, got {self.group!r}")

    def size_refusal(self, in_features: int, out_features: int) -> str | None:
        if in_features % self.group:
            return f"Int4 in groups of {self.group} needs in_features that are multiples of it, got {in_features}"
        return None

    @property
    def decoding(self) -> Decoding:
        return Decoding(Codes.INTEGER, self.group)

    def bits(self, in_features: int) -> float:
        return 4 + (16 + 4 * self.zero_points) / self.group

    def quantize(self, weight: Tensor) -> Weight:
        groups = split(weight.float(), -1, self.group)
        if not self.zero_points:
            scales = _positive(groups.abs().amax(-1) / 7.5).bfloat16()
            return Weight(_packed((groups / scales.float().unsqueeze(-1)).flatten(-2)), scales)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = _positive((high - low) / 15).bfloat16()
        zeros = (-low / scales.float()).round().clamp(0, 15) - _OFFSET
        integers = groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)
        return Weight(_packed(integers.flatten(-2)), scales, packed_along_rows(zeros))

    def values(self, weight: Weight) -> Tensor:
        assert weight.scales is not None
        integers = torch.arange(-_OFFSET, _OFFSET, device=weight.data.device, dtype=torch.float32)
        values = looked_up(weight.data, table_of_bytes(integers))
        if weight.amax is not None:
            zeros = unpacked_along_rows(weight.amax, values.shape[-2])
            values.view(*zeros.shape, -1).sub_(zeros.unsqueeze(-1))
        return scaled_by_block(values, weight.scales.float())


def _positive(scales: Tensor) -> Tensor:
    """The scales, with 1 for groups of zeros."""
    return torch.where(scales > 0, scales, 1.0)


def _packed(integers: Tensor) -> Tensor:
    """Bytes of two integers from -8 to 7, the first one in the low bits."""
    codes = (integers.round().clamp(-_OFFSET, _OFFSET - 1) + _OFFSET).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def packed_along_rows(zeros: Tensor) -> Tensor:
    """int32 [E, ceil(N / 8), groups] of integers [E, N, groups] from -8 to 7; the first row is in the low bits."""
    codes = split((zeros + _OFFSET).to(torch.int32), -2, _CODES_IN_WORD)
    return torch.sum(codes << _shifts(zeros.device), -2, dtype=torch.int32)


def unpacked_along_rows(packed: Tensor, rows: int) -> Tensor:
    """float32 [E, rows, groups], the inverse of :func:`packed_along_rows`."""
    codes = packed.unsqueeze(-2) >> _shifts(packed.device) & 15
    return codes.flatten(-3, -2)[..., :rows, :].float() - _OFFSET


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, device=device, dtype=torch.int32).unsqueeze(-1)
