"""NVFP4 as a weight-only format of checkpoints: e2m1 with an e4m3 scale for each 16 values, and a float32 factor.

Values are ``code * (scale * factor)`` for modelopt's ``weight_scale_2``, and ``code * (scale / factor)`` for the
``weight_global_scale`` of compressed-tensors. The scale of a block is rounded to float32 first, as the packages do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .copies import Weight
from .decoding import Codes, Decoding
from .formats import E2M1_MAX, E4M3, cast_e2m1, from_e2m1, pack
from .nibbles import looked_up, scaled_by_block, table_of_bytes
from .nvfp4 import NV_BLOCK
from .recipe import check_choice, check_flag, register
from .reference import split
from .weight_only import WeightOnly


@register
@dataclass(frozen=True)
class NVFP4Weight(WeightOnly):
    """Weights in e2m1 with an e4m3 scale for each 16 values of a row and float32 factors; rows stay in 16 bits.

    Attributes:
        sections: the number of factors of each group [E, sections]; 2 if gate and up have factors of their own.
        divides: whether scales are divided by the factors, as compressed-tensors stores them; modelopt multiplies.

    Raises:
        ValueError: another value.
    """

    sections: int = 1
    divides: bool = False
    values_in_byte: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_flag(self, "divides")
        check_choice(self, "sections", (1, 2))  # type: ignore[arg-type]

    def size_refusal(self, in_features: int, out_features: int) -> str | None:
        if in_features % NV_BLOCK:
            return f"NVFP4Weight needs in_features that are multiples of {NV_BLOCK}, got {in_features}"
        return sections_refusal(self.name, self.sections, out_features)

    def stored_refusal(self, weight: Weight) -> str | None:
        assert weight.amax is not None
        wrong = weight.amax[~(weight.amax.isfinite() & (weight.amax > 0))]
        if wrong.numel():
            return f"the factor of a group is {float(wrong[0])}: the weights would be nothing"
        return super().stored_refusal(weight)

    @property
    def decoding(self) -> Decoding:
        return Decoding(Codes.E2M1, NV_BLOCK, divides=self.divides)

    def bits(self, in_features: int) -> float:
        return 4 + 8 / NV_BLOCK

    def quantize(self, weight: Tensor) -> Weight:
        blocks = split(weight.float(), -1, NV_BLOCK)
        by_section = split(weight.float(), 1, weight.shape[1] // self.sections).abs().amax((2, 3))
        factors = torch.where(by_section > 0, by_section, 1.0) / (E2M1_MAX * E4M3.max)
        of_rows = factors_by_row(factors, weight.shape[1])
        amax = blocks.abs().amax(-1) / E2M1_MAX
        scales = (torch.where(amax > 0, amax, 1.0) / of_rows).clamp(2.0**-9, E4M3.max).to(E4M3.dtype)
        codes = cast_e2m1(blocks / (scales.float() * of_rows).unsqueeze(-1))
        return Weight(pack(codes.flatten(-2)), scales, 1 / factors if self.divides else factors)

    def values(self, weight: Weight) -> Tensor:
        assert weight.scales is not None
        assert weight.amax is not None
        codes = torch.arange(16, device=weight.data.device)
        factors = factors_by_row(weight.amax, weight.data.shape[1])
        scales = weight.scales.float()
        scales = scales / factors if self.divides else scales * factors
        return scaled_by_block(looked_up(weight.data, table_of_bytes(from_e2m1(codes))), scales)


def factors_by_row(factors: Tensor, rows: int) -> Tensor:
    """[E, N, 1], of factors [E, sections] of equal parts of the rows."""
    return factors.repeat_interleave(rows // factors.shape[1], 1).unsqueeze(-1)


def sections_refusal(name: str, sections: int, out_features: int) -> str | None:
    """Why rows do not have so many sections; None: they do."""
    return (
        f"{name} needs out_features that divide by {sections}, got {out_features}" if out_features % sections else None
    )
