"""Who makes what the products of a linear read: kernels, by the scales of the recipe, or else PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser.contract import tracing as trace
from ...fuser.replay import capture
from ..formats.copies import Columns, Rows, Scaling, Transposition, Weight, WeightOperands
from ..formats.recipe import Recipe
from ..kernels import Matrices
from ..kernels.doors.quantized import quantize_rows, quantize_weight
from ..kernels.doors.quantized_whole import quantize_whole_rows, quantize_whole_weight
from ..kernels.problems.gemm import nbytes, stacked


class TokenCopies(NamedTuple):
    """Tokens as the products of a linear read them; None for what no product reads.

    Attributes:
        number: of tokens.
        dtype: before they were quantised.
        values: before they were quantised.
    """

    number: int
    dtype: torch.dtype
    values: Tensor | None
    rows: Rows | None
    columns: Columns | None

    @property
    def for_wgrad(self) -> Tensor | Columns | None:
        """The operand of the gradient of a weight."""
        return self.values if self.columns is None else self.columns


class GatheredTokens(NamedTuple):
    """Rows of experts that are read where their tokens lie.

    Attributes:
        tokens: [T, K].
        slot_of_row: [R]: the slot, token * top_k + j, of each row; None: the rows are the tokens.
    """

    tokens: Tensor
    slot_of_row: Tensor | None
    top_k: int

    @property
    def number(self) -> int:
        """The number of rows."""
        return self.tokens.shape[0] if self.slot_of_row is None else self.slot_of_row.shape[0]

    def rows(self) -> Tensor:
        """[R, K], gathered."""
        return self.tokens if self.slot_of_row is None else self.tokens.index_select(0, self.slot_of_row // self.top_k)


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


def copies_of(
    recipe: Recipe,
    tokens: Tensor | GatheredTokens,
    split_sizes: Tensor,
    *,
    rows: bool,
    wgrad: bool,
    values: bool = False,
    is_gradient: bool = False,
) -> TokenCopies:
    """The operands of ``tokens`` [T, K].

    Args:
        tokens: those that are gathered have no values.
        rows: whether a product of rows reads them.
        wgrad: whether the gradient of a weight does.
        values: whether something else reads what was not quantised.
    """
    columns, kept = wgrad and recipe.quantises_wgrad, None
    if isinstance(tokens, Tensor):
        kept = tokens if values or (wgrad and not columns) else None
        tokens = GatheredTokens(tokens, None, 1)
    read: TokenOperands = None, None
    if rows or columns:
        wanted = WantedOperands(rows, columns, is_gradient)
        read = QUANTISERS[recipe.kernels(is_gradient)].tokens(recipe, tokens, split_sizes, wanted)
    return TokenCopies(tokens.number, tokens.tokens.dtype, kept, *read)


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
