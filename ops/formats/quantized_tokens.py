"""Tokens that are quantised in blocks by powers of two, as another rank sends them and as products read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .copies import BLOCK, Rows
from .formats import from_e8m0
from .recipe import Recipe, gives_blocks


class QuantizedTokens(NamedTuple):
    """Rows of experts whose tokens arrive quantised: e4m3, with a power of two for each 128 values.

    Attributes:
        rows: bytes [R, K], which may have a pitch, and scales.
        exponents: the same scales as they came: e8m0 as uint8 [R, ceil(K / 128)], at the pitch of the bytes.
        dtype: the dtype of the tokens, which represents the values exactly.
    """

    rows: Rows
    exponents: Tensor
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
        return decoded(self.rows.data, self.exponents, self.dtype)


def decoded(data: Tensor, exponents: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of e4m3 bytes [R, K] times powers of two, e8m0 as uint8 [R, ceil(K / 128)], rounded to ``dtype``."""
    values, scales = data.to(dtype), from_e8m0(exponents).to(dtype)
    whole = values.shape[1] // BLOCK
    values[:, : whole * BLOCK].view(data.shape[0], whole, BLOCK).mul_(scales[:, :whole].unsqueeze(-1))
    values[:, whole * BLOCK :].mul_(scales[:, whole:])
    return values
