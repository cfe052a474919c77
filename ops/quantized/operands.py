"""Makes the operands of a linear's products: by kernels, if they know the recipe's scaling, or by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...fuser.contract import tracing as trace
from ...fuser.replay import capture
from ..formats.copies import Columns, Rows, Scaling, Transposition, Weight, WeightOperands
from ..formats.quantized_tokens import QuantizedTokens
from ..formats.recipe import Recipe
from ..kernels import Matrices
from ..kernels.doors.quantized import quantize_rows, quantize_weight
from ..kernels.doors.quantized_whole import quantize_whole_rows, quantize_whole_weight
from ..kernels.doors.routing import Routing, permute
from ..kernels.problems.gemm import nbytes, stacked


class GatheredTokens(NamedTuple):
    """Rows of experts that are read where their tokens lie.

    Attributes:
        tokens: [T, K].
        routing: gives the token of each row; None: the rows are the tokens.
    """

    tokens: Tensor
    routing: Routing | None = None

    @classmethod
    def of(cls, tokens: Tensor, routing: Routing) -> GatheredTokens:
        """The rows of the experts, as kernels read them."""
        return cls(tokens if tokens.stride(-1) == 1 else tokens.contiguous(), routing)

    @property
    def slot_of_row(self) -> Tensor | None:
        """[R]: the slot, token * top_k + j, of each row; None: the rows are the tokens."""
        return None if self.routing is None else self.routing.slot_of_row

    @property
    def top_k(self) -> int:
        return 1 if self.routing is None else self.routing.row_of_slot.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the rows, [R, K]."""
        return (self.tokens if self.routing is None else self.routing.slot_of_row).shape[0], self.tokens.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.tokens.dtype

    def rows(self) -> Tensor:
        """The gathered rows [R, K]; rows of no expert are arbitrary."""
        return self.tokens if self.routing is None else permute(self.tokens, self.routing, fill=False)


@dataclass(slots=True)
class Tokens:
    """Tokens as the products of a linear read them; None for what no product reads.

    Attributes:
        dtype: before they were quantised.
        values: [R, K], before they were quantised.
        for_wgrad: the operand of the gradient of a weight.
        recipe: the one that quantised them; None: products read the values.
        number: of tokens, which quantised operands do not tell.
    """

    dtype: torch.dtype
    values: Tensor | None
    for_wgrad: Tensor | GatheredTokens | Columns | None
    rows: Rows | None = None
    recipe: Recipe | None = None
    number: int = 0


class WantedOperands(NamedTuple):
    """Which operands of tokens are wanted, and whether the tokens are a gradient."""

    rows: bool
    columns: bool
    is_gradient: bool


TokenOperands = tuple[Rows | None, Columns | None]


class Quantiser(NamedTuple):
    """Makes the operands of a recipe, from tokens with their split sizes, and from weights [E, N, K].

    Attributes:
        weight: the last argument says whether the gradient of rows reads the weight, too.
    """

    tokens: Callable[[Recipe, GatheredTokens, Tensor, WantedOperands], TokenOperands]
    weight: Callable[[Recipe, Matrices, bool], WeightOperands]


def tokens_for(
    reader: nn.Module | None,
    recipe: Recipe | None,
    tokens: Tensor | GatheredTokens,
    split_sizes: Tensor,
    *,
    rows: bool,
    wgrad: bool,
    values: bool = False,
    is_gradient: bool = False,
) -> Tokens:
    """``tokens`` [R, K] in the form that the products of a linear read, gathered if their values are read.

    Args:
        reader: the linear whose delayed scales take a step; None: no step.
        recipe: the recipe; None: nothing is quantised.
        rows: whether a product of rows reads the tokens.
        wgrad: whether the gradient of a weight reads them.
        values: whether another reader needs the unquantised values.
    """
    if recipe is None:
        return Tokens(tokens.dtype, tokens if isinstance(tokens, Tensor) else tokens.rows(), tokens)
    columns = wgrad and recipe.quantises_wgrad
    keeps = values or (wgrad and not columns)
    if not isinstance(tokens, Tensor) and (keeps or recipe.steps is not None):
        tokens = tokens.rows()
    on, kept = recipe, None
    if isinstance(tokens, Tensor):
        if reader is not None:
            on = recipe.on(reader, "gradient" if is_gradient else "x", tokens, split_sizes)
        kept, tokens = tokens if keeps else None, GatheredTokens(tokens)
    by_row, by_column = None, None
    if rows or columns:
        wanted = WantedOperands(rows, columns, is_gradient)
        by_row, by_column = QUANTISERS[on.kernels(is_gradient)].tokens(on, tokens, split_sizes, wanted)
    return Tokens(tokens.dtype, kept, kept if by_column is None else by_column, by_row, recipe, tokens.shape[0])


def quantized_tokens_for(
    reader: nn.Module, recipe: Recipe | None, tokens: QuantizedTokens, split_sizes: Tensor, wgrad: bool
) -> Tokens:
    """:func:`tokens_for` of rows that a product of this recipe reads as they came; others read their values."""
    if not tokens.are_of(recipe):
        return tokens_for(reader, recipe, tokens.values(), split_sizes, rows=True, wgrad=wgrad)
    assert recipe is not None
    trace.note("products read the bytes of the rows as they came")
    kept, columns = None, None
    if wgrad and recipe.quantises_wgrad:
        columns = quantize_rows(
            tokens.rows.data,
            split_sizes,
            power_of_two=True,
            want_rows=False,
            want_columns=True,
            exponents=tokens.exponents,
        ).columns
    elif wgrad:
        kept = tokens.values()
    return Tokens(tokens.dtype, kept, kept if columns is None else columns, tokens.rows, recipe, tokens.shape[0])


def weight_operands(recipe: Recipe, weight: Matrices, both: bool) -> WeightOperands:
    """The operands of products with a weight [E, N, K]; ``both``: also that of the gradient of rows."""
    return QUANTISERS[recipe.kernels(False)].weight(recipe, weight, both)


# ---- kernels that write bytes


def _tokens_in_blocks(
    recipe: Recipe, tokens: GatheredTokens, split_sizes: Tensor, wanted: WantedOperands
) -> TokenOperands:
    copies = quantize_rows(
        tokens.tokens,
        split_sizes,
        power_of_two=recipe.is_power_of_two,
        want_rows=wanted.rows,
        want_columns=wanted.columns,
        slot_of_row=tokens.slot_of_row,
        top_k=tokens.top_k,
    )
    return copies.rows, copies.columns


def _whole_tokens(recipe: Recipe, tokens: GatheredTokens, split_sizes: Tensor, wanted: WantedOperands) -> TokenOperands:
    assert recipe.scaling is not None
    copies = quantize_whole_rows(
        tokens.tokens,
        split_sizes,
        scaling=recipe.scaling,
        power_of_two=recipe.is_power_of_two,
        want_rows=wanted.rows,
        want_columns=wanted.columns,
        encode=recipe.encode,
        slot_of_row=tokens.slot_of_row,
        top_k=tokens.top_k,
    )
    return copies.rows, copies.columns


def _weight_in_blocks(recipe: Recipe, weight: Matrices, both: bool) -> WeightOperands:
    copies = quantize_weight(weight, power_of_two=recipe.is_power_of_two, both=both)
    back = None if copies.transposed is None else Weight(copies.transposed, copies.scales, turn=Transposition.VIEW)
    return WeightOperands(Weight(copies.data, copies.scales), back)


def _whole_weight(recipe: Recipe, weight: Matrices, both: bool) -> WeightOperands:
    assert recipe.scaling is not None
    options: dict[str, Any] = {"power_of_two": recipe.is_power_of_two, "both": both, "encode": recipe.encode}
    copies = quantize_whole_weight(weight, scaling=recipe.scaling, **options)
    back = None if copies.transposed is None else Weight(copies.transposed, copies.transposed_scales)
    return WeightOperands(Weight(copies.data, copies.scales), back)


# ---- PyTorch, by the definition of the recipe


def _defined_tokens(
    recipe: Recipe, tokens: GatheredTokens, split_sizes: Tensor, wanted: WantedOperands
) -> TokenOperands:
    source = tokens.rows()
    if not recipe.quantises_tokens:
        capture.refuse("products of packed weights are not replayed")
        return Rows(source), None
    capture.refuse(f"PyTorch quantises for {recipe.name}")
    rows, columns = recipe.token_operands(source, split_sizes, *wanted)
    names = [name for name, is_wanted in (("rows", wanted.rows), ("columns", wanted.columns)) if is_wanted]
    _note(recipe, f"rows {'+'.join(names)}", nbytes(source, *(rows or ()), *(columns or ())))
    return rows, columns


def _defined_weight(recipe: Recipe, weight: Matrices, both: bool) -> WeightOperands:
    capture.refuse(f"PyTorch quantises for {recipe.name}")
    read = recipe.weight_operands(stacked(weight).detach(), both)
    back = () if read.backward is None else read.backward.tensors
    _note(recipe, f"weight {'both' if both else 'rows'}", nbytes(weight, *read.forward.tensors, *back))
    return read


def _note(recipe: Recipe, copies: str, size: int) -> None:
    """Tells a trace that PyTorch quantises something."""
    if trace.active():
        why = f"no kernels for {recipe.name}"
        trace.record(trace.KernelCall("torch (quantise)", why, 0, size, f"torch, {copies}, {size / 1e6:.1f} MB"))


QUANTISERS: dict[Scaling | None, Quantiser] = {
    Scaling.BLOCKS: Quantiser(_tokens_in_blocks, _weight_in_blocks),
    Scaling.ROWS: Quantiser(_whole_tokens, _whole_weight),
    Scaling.GROUPS: Quantiser(_whole_tokens, _whole_weight),
    None: Quantiser(_defined_tokens, _defined_weight),
}
"""By how kernels scale; None: no kernel quantises. ``quantized/values.py`` adds those of emulated formats."""
