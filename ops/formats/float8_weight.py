"""FP8 of weights alone: e4m3 with scales of blocks of 128 x 128, of rows or of whole matrices, beside 16-bit rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from .copies import BLOCK, Weight
from .decoding import Codes, Decoding
from .formats import E4M3, cast, from_e8m0
from .nvfp4_weight import factors_by_row, sections_refusal
from .recipe import check_choice, register
from .reference import quantize_weight, split
from .weight_only import SCALE_DTYPES, WeightOnly

Scales = Literal["blocks", "rows", "tensor"]
_BLOCKS = {"blocks": (BLOCK, BLOCK), "rows": (None, 1), "tensor": (None, None)}
"""The columns and rows that share a scale."""


@register
@dataclass(frozen=True)
class Float8Weight(WeightOnly):
    """Weights in e4m3 as checkpoints store them, decoded for products with rows in 16 bits.

    Attributes:
        scales: ``"blocks"`` of 128 x 128 (DeepSeek-V3, Qwen3-FP8): [E, ceil(N / 128), ceil(K / 128)]; ``"rows"`` (by
            channel): [E, N]; or ``"tensor"``: [E, sections].
        sections: with ``"tensor"``, 2 if gate and up have scales of their own; else 1.

    Raises:
        ValueError: another value.
    """

    scales: Scales = "blocks"
    sections: int = 1
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (*SCALE_DTYPES, torch.float8_e8m0fnu)

    def __post_init__(self) -> None:
        check_choice(self, "scales", get_args(Scales))
        check_choice(self, "sections", (1, 2) if self.scales == "tensor" else (1,))  # type: ignore[arg-type]

    def size_refusal(self, in_features: int, out_features: int) -> str | None:
        return sections_refusal(self.name, self.sections, out_features)

    @property
    def decoding(self) -> Decoding:
        return Decoding(Codes.E4M3, *_BLOCKS[self.scales])

    def bits(self, in_features: int) -> float:
        return 8 + {"blocks": 32 / BLOCK**2, "rows": 32 / in_features, "tensor": 0}[self.scales]

    def quantize(self, weight: Tensor) -> Weight:
        if self.scales == "blocks":
            return quantize_weight(weight, 1, False)
        by_section = split(weight.float(), 1, weight.shape[1] // self.sections)
        amax = weight.float().abs().amax(2) if self.scales == "rows" else by_section.abs().amax((2, 3))
        scales = torch.where(amax > 0, amax, 1.0) / E4M3.max
        return Weight(cast(weight.float() / self._of_rows(scales, weight.shape[1]), E4M3), scales)

    def values(self, weight: Weight) -> Tensor:
        assert weight.scales is not None
        is_power = weight.scales.dtype == torch.float8_e8m0fnu
        scales = from_e8m0(weight.scales) if is_power else weight.scales.float()
        values, (_, rows, columns) = weight.data.float(), weight.data.shape
        if self.scales != "blocks":
            return values.mul_(self._of_rows(scales, rows))
        by_column = scales.repeat_interleave(BLOCK, -1)[..., :columns]
        for first in range(0, rows, BLOCK):
            values[:, first : first + BLOCK].mul_(by_column[:, first // BLOCK].unsqueeze(1))
        return values

    def _of_rows(self, scales: Tensor, rows: int) -> Tensor:
        """[E, N, 1]."""
        return scales.unsqueeze(-1) if self.scales == "rows" else factors_by_row(scales, rows)
