"""A recipe: the number format of the operands of a grouped product, as one object. Values, part of settings and plans.

A number format is a file with one class: its refusals, its quantisers of tokens and weights, their inverses, and the
operands of its products. :func:`register` makes it known: to state dicts, saved tensors and checks of arguments. The
defaults here serve a format that no kernel knows: PyTorch quantises, and products are those of the values in bfloat16.

Tokens [T, K] are sorted by group, with the rows of each in ``split_sizes``. Their rows are contracted over K, their
columns over the tokens. A weight is [E, N, K]; transposed, it is contracted over N, for the gradient of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ...fuser.contract.errors import did_you_mean, shown
from .copies import Columns, PackedFormat, Rows, Scaling, Weight, WeightOperands

R = TypeVar("R", bound="type[Recipe]")
RECIPES: dict[str, type[Recipe]] = {}
"""The number formats by name."""


def register(recipe: R) -> R:
    """Makes a number format known by the name of its class."""
    RECIPES[recipe.__name__] = recipe
    return recipe


def transposed_bytes(data: Tensor) -> Tensor:
    """The transposes [E, K, N] of matrices [E, N, K] of a dtype of 8 bits, by PyTorch."""
    return data.view(torch.uint8).mT.contiguous().view(data.dtype)


class Recipe:
    """A number format. A subclass is a frozen dataclass whose fields are its switches.

    Attributes:
        quantises: whether it quantises anything.
        quantises_tokens: whether tokens are quantised, not only weights.
        scaling: the values that share a scale in tensors that kernels quantise; None: no kernel quantises.
        values_in_byte: how many values of a weight share a byte.
        scale_dtypes: the dtypes that a weight's scales may have and keep; empty: only the recipe's own dtype.
        encode: float32 [E], the factor of the values of each group; None: it is computed from the values.
    """

    quantises: ClassVar[bool] = True
    quantises_tokens: ClassVar[bool] = True
    scaling: ClassVar[Scaling | None] = None
    values_in_byte: ClassVar[int] = 1
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    encode: Tensor | None = None

    @property
    def name(self) -> str:
        """The name in messages."""
        return type(self).__name__

    @property
    def packed(self) -> PackedFormat | None:
        """How kernels read the bytes of a weight that stays as it is; None: they do not, or multiply the bytes."""
        return None

    @property
    def has_one_copy(self) -> bool:
        """Whether a weight and its transpose have the same bytes and scales."""
        return False

    @property
    def has_square_blocks(self) -> bool:
        """Whether a scale of a weight is of several of its rows."""
        return False

    @property
    def fast_accumulation(self) -> bool:
        """Whether products of whole rows are summed by the tensor cores alone."""
        return False

    @property
    def steps(self) -> Steps | None:
        """The scales that a linear carries from step to step; None: they come from the tensors themselves."""
        return None

    @property
    def is_power_of_two(self) -> bool:
        """Whether scales in float32 are powers of two."""
        return False

    @property
    def quantises_wgrad(self) -> bool:
        """Whether weight gradients are products of quantised columns."""
        return True

    def kernels(self, is_gradient: bool) -> Scaling | None:
        """By which scales kernels quantise tokens; None: PyTorch quantises."""
        return self.scaling

    # ---- what it refuses

    def dtype_refusal(self, dtype: torch.dtype) -> str | None:
        """Why rows of this dtype are not quantised; None: they are."""
        if dtype in (torch.bfloat16, torch.float16):
            return None
        return f"{self.name} quantises bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"

    def size_refusal(self, in_features: int, out_features: int) -> str | None:
        """Why a weight of this size is not quantised; None: it is."""
        return None

    # ---- how it quantises: the definition, by PyTorch

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        """The rows of tokens [T, K]."""
        raise NotImplementedError

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        """The columns of tokens [T, K]."""
        raise NotImplementedError

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        """A weight [E, N, K]. No block spans two of its ``parts``, where blocks have several rows."""
        raise NotImplementedError

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        """The transpose of a weight [E, N, K], contracted over N."""
        raise NotImplementedError

    # ---- which values that stands for, in float32

    def row_values(self, rows: Rows, split_sizes: Tensor) -> Tensor:
        """[T, K]."""
        raise NotImplementedError

    def column_values(self, columns: Columns, split_sizes: Tensor, rows: int) -> Tensor:
        """[T, K], zero in the tail."""
        raise NotImplementedError

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        """[E, N, K]."""
        raise NotImplementedError

    def transposed_values(self, weight: Weight, parts: int = 1) -> Tensor:
        """[E, N, K], of the transpose of a weight."""
        return self.weight_values(weight, parts).mT

    # ---- what products read of it

    def row_operand(self, rows: Rows, split_sizes: Tensor) -> Rows:
        """For a product of rows."""
        return Rows(self.row_values(rows, split_sizes).bfloat16())

    def column_operand(self, columns: Columns, split_sizes: Tensor, rows: int) -> Columns:
        """The columnwise operand of a weight gradient, for so many tokens."""
        values = self.column_values(columns, split_sizes, rows).bfloat16()
        return Columns(values, split_sizes=split_sizes)

    def weight_operand(self, weight: Weight, parts: int = 1) -> Weight:
        """The operand of the forward."""
        return Weight(self.weight_values(weight, parts).bfloat16())

    def transposed_operand(self, weight: Weight) -> Weight:
        """The operand of the gradient of rows, from a transposed copy that was quantised for it."""
        return Weight(self.transposed_values(weight).bfloat16().mT)

    def turned(
        self, weight: Weight, parts: int = 1, transpose: Callable[[Tensor], Tensor] = transposed_bytes
    ) -> Weight:
        """For the gradient of rows, of a weight that is stored for the forward.

        Args:
            transpose: does what :func:`transposed_bytes` does.
        """
        operand = self.weight_operand(weight, parts)
        return operand._replace(data=operand.data.mT)

    def stored_operand(self, weight: Weight) -> Weight:
        """For the forward, of a weight that stays as it is: its bytes, if kernels read them."""
        return self.weight_operand(weight) if self.packed is None else weight._replace(packed=self.packed)

    def token_operands(
        self, x: Tensor, split_sizes: Tensor, rows: bool, columns: bool, is_gradient: bool = False
    ) -> tuple[Rows | None, Columns | None]:
        """The wanted operands of products for tokens [T, K]."""
        by_row = self.row_operand(self.rows(x, split_sizes, is_gradient), split_sizes) if rows else None
        if not columns:
            return by_row, None
        by_column = self.columns(x, split_sizes, is_gradient)
        return by_row, self.column_operand(by_column, split_sizes, x.shape[0])

    def weight_operands(self, weight: Tensor, both: bool) -> WeightOperands:
        """The operands of products for a weight [E, N, K]; ``both``: also for the gradient of rows."""
        stored = self.weight(weight)
        forward = self.weight_operand(stored)
        if not both:
            return WeightOperands(forward, None)
        if self.has_one_copy:
            return WeightOperands(forward, self.turned(stored))
        return WeightOperands(forward, self.transposed_operand(self.transposed_weight(weight)))

    # ---- products in 16 bits of values that kernels round

    def rounding(self, x: Tensor, is_gradient: bool) -> dict[str, Any]:
        """The additional arguments of kernels that round tokens."""
        return {}

    def filled_sizes(self, split_sizes: Tensor) -> Tensor:
        """The rows of each group among the values of columns."""
        return split_sizes

    # ---- scales of steps before

    def on(self, linear: nn.Module, tensor: str, values: Tensor, split_sizes: Tensor | None = None) -> Recipe:
        """The recipe for a tensor of a linear, with the scales of its steps; the call counts as a step.

        Args:
            tensor: ``"x"``, ``"weight"`` or ``"gradient"`` (of the output).
            split_sizes: the rows of each group; None for a weight.
        """
        return self

    def scales_of_forward(self, linear: nn.Module) -> Tensor | None:
        """The factor of x in the last forward of a linear, which its backward may need; None: nothing is kept."""
        return None

    def with_scales(self, encode: Tensor | None) -> Recipe:
        """The recipe with the scales of a forward, from what :meth:`scales_of_forward` gave; None: as it is."""
        return self


class Steps(ABC):
    """Scales that a linear carries from step to step, in buffers."""

    @abstractmethod
    def buffers(self, groups: int, device: torch.device | None) -> Mapping[str, Tensor]:
        """The buffers of a linear before its first step."""

    @abstractmethod
    def advanced(
        self, recipe: Any, linear: nn.Module, tensor: str, values: Tensor, split_sizes: Tensor | None
    ) -> Recipe:
        """See :meth:`Recipe.on`."""

    @abstractmethod
    def of_forward(self, linear: nn.Module) -> Tensor:
        """See :meth:`Recipe.scales_of_forward`."""


@dataclass(frozen=True)
class NoRecipe(Recipe):
    """A recipe that quantises nothing, for an op to which an enclosing ``config(recipe=...)`` must not apply."""

    quantises: ClassVar[bool] = False


def is_recipe(value: Any) -> bool:
    """Whether a value is a recipe, including ``NoRecipe()``."""
    return isinstance(value, Recipe)


def gives_blocks(recipe: Any) -> bool:
    """Whether a value is a recipe whose kernels quantise blocks of 128 x 128 of a weight."""
    return is_recipe(recipe) and recipe.kernels(False) is Scaling.BLOCKS


def check_choice(recipe: Recipe, name: str, choices: Iterable[str]) -> None:
    """Raises :class:`ValueError` where a switch is none of these."""
    value = getattr(recipe, name)
    if value not in choices:
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        expected = " or ".join(map(repr, choices))
        raise ValueError(f"{recipe.name}: {name} must be {expected}, got {shown(value)}{near}")


def check_flag(recipe: Recipe, name: str) -> None:
    """Raises :class:`ValueError` where a switch is not a bool."""
    if not isinstance(value := getattr(recipe, name), bool):
        raise ValueError(f"{recipe.name}: {name} must be True or False, got {shown(value)}")
