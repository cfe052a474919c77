"""Weight-only formats: bytes of 8 or 4 bits as in checkpoints, beside rows and gradients of 16 bits.

A product reads values that are decoded for it and dropped after it; only the bytes stay. A format is a file with one
class: its refusals, its parts, its quantiser, and its values.
"""

from __future__ import annotations

from abc import abstractmethod
from ast import literal_eval
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from .copies import Columns, Rows, Transposition, Weight, WeightOperands
from .decoding import Decoding
from .recipe import RECIPES, Recipe, transposed_bytes
from .runs import decode_in_runs, runs

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of scales that checkpoints have, in which they stay."""


class WeightOnly(Recipe):
    """Weights in 8 or 4 bits that are multiplied in 16. A subclass is a frozen dataclass, like any recipe.

    A stored weight has up to three parts: ``data`` [E, N, bytes of a row], ``scales``, and ``amax`` for what decodes
    besides them.
    """

    quantises_tokens: ClassVar[bool] = False
    quantises_wgrad: ClassVar[bool] = False
    has_one_copy: ClassVar[bool] = True

    @abstractmethod
    def quantize(self, weight: Tensor) -> Weight:
        """The parts of a weight [E, N, K] of any float type, each value the nearest code."""

    @abstractmethod
    def values(self, weight: Weight) -> Tensor:
        """float32 [E, N, K]: products of codes and scales, rounded to float32."""

    @property
    def decoding(self) -> Decoding | None:
        """The format in the terms of kernels; None: PyTorch alone decodes it."""
        return None

    @abstractmethod
    def bits(self, in_features: int) -> float:
        """Bits a weight, with those of its scales."""

    def stored_refusal(self, weight: Weight) -> str | None:
        """Why parts of the right shapes and dtypes are not a valid weight; None: they are. Reads values."""
        numbers = [part.float() for part in weight.decoders if part.is_floating_point()]
        wrong = sum(int((~part.isfinite()).sum()) for part in numbers)
        return f"scales must be finite, and {wrong} are not" if wrong else None

    def decoded(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """[E, N, K]: :meth:`values` rounded to a dtype."""
        groups, rows, packed = weight.data.shape
        out = weight.data.new_empty((groups, rows, packed * self.values_in_byte), dtype=dtype)
        self.decode_into(out, weight)
        return out

    def decode_into(self, out: Tensor, weight: Weight) -> None:
        """Writes :meth:`decoded`, without temporaries of the size of all experts."""
        decode_in_runs(lambda run: self.values(part_of(weight, run)), out)

    def dtype_refusal(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.bfloat16:
            return None
        return f"{self.name} multiplies bfloat16, not {str(dtype).removeprefix('torch.')}"

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        raise ValueError(f"{self.name} quantises weights, not tokens")

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        raise ValueError(f"{self.name} quantises weights, not tokens")

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        groups, rows, columns = weight.shape
        if groups <= 1 or weight.is_meta:
            return self.quantize(weight)
        by_run = [self.quantize(weight[run]).tensors for run in runs(groups, rows * columns)]
        return Weight(*[None if part[0] is None else torch.cat(part) for part in zip(*by_run, strict=True)])  # type: ignore[arg-type]

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        raise ValueError(f"{self.name} has no columnwise copy of a weight: the rowwise one is read for all products")

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return self.decoded(weight, torch.float32)

    def weight_operand(self, weight: Weight, parts: int = 1) -> Weight:
        return Weight(self.decoded(weight, torch.bfloat16))

    def weight_operands(self, weight: Tensor, both: bool) -> WeightOperands:
        stored = self.weight(weight)
        return WeightOperands(stored, stored._replace(turn=Transposition.COPY) if both else None)

    def stored_operand(self, weight: Weight) -> Weight:
        return weight._replace(packed=self.packed)

    def turned(
        self, weight: Weight, parts: int = 1, transpose: Callable[[Tensor], Tensor] = transposed_bytes
    ) -> Weight:
        return weight._replace(turn=Transposition.VIEW)


def part_of(weight: Weight, groups: slice) -> Weight:
    """The stored weight of some of the groups, as views."""
    data, scales, amax = (None if tensor is None else tensor[groups] for tensor in weight.tensors)
    assert data is not None
    return weight._replace(data=data, scales=scales, amax=amax)


def in_words(recipe: WeightOnly) -> str:
    """The format as text, for a schema: its name and its switches."""
    switches: Any = fields(recipe)  # type: ignore[arg-type]
    return " ".join([recipe.name, *[f"{field.name}={getattr(recipe, field.name)!r}" for field in switches]])


def of_words(text: str) -> WeightOnly:
    """The inverse of :func:`in_words`."""
    name, *switches = text.split()
    values = dict(switch.split("=") for switch in switches)
    built: Any = RECIPES[name](**{key: literal_eval(value) for key, value in values.items()})
    recipe: WeightOnly = built
    return recipe
