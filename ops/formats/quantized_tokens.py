"""Tokens that are quantised in blocks by powers of two, as another rank sends them and as products read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .copies import BLOCK, Rows
from .recipe import Recipe, gives_blocks


class QuantizedTokens(NamedTuple):
    """Rows of experts whose tokens arrive quantised: e4m3, with a power of two for each 128 values.

    Attributes:
        rows: bytes [R, K], which may have a pitch, and scales.
        dtype: the dtype of the tokens, which represents the values exactly.
    """

    rows: Rows
    dtype: torch.dtype = torch.bfloat16

    @staticmethod
    def are_of(recipe: Recipe | None) -> bool:
        """Whether they are what this recipe makes of tokens."""
        return recipe is not None and gives_blocks(recipe) and recipe.is_power_of_two

    @property
    def shape(self) -> torch.Size:
        """The shape of the rows, [R, K]."""
        return self.rows.data.shape

    def values(self) -> Tensor:
        """[R, K], dequantised."""
        count, columns = self.shape
        assert self.rows.scales is not None
        scales = self.rows.scales[:, :count].t().to(self.dtype)
        return self.rows.data.to(self.dtype).mul_(scales.repeat_interleave(BLOCK, 1)[:, :columns])
