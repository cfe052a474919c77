"""Who makes what the products of a linear read: kernels, by the scales of the recipe, or else PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import tracing as trace
from ..fuser.replay import capture
from . import quantized_values
from .kernels import Matrices
from .kernels.problem import nbytes, stacked
from .kernels.quantized import quantize_rows, quantize_weight
from .kernels.quantized_whole import quantize_whole_rows, quantize_whole_weight
from .quantized.copies import Columns, Rows, Scaling, Transposition, Weight, WeightOperands
from .quantized.recipe import Recipe


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
        """What the gradient of a weight reads."""
        return self.values if self.columns is None else self.columns


class GatheredTokens(NamedTuple):
    """Rows of experts that are read where their tokens lie.

    Attributes:
        tokens: [T, K].
        slot_of_row: [R]: the slot, token * top_k + j, of each row.
    """

    tokens: Tensor
    slot_of_row: Tensor
    top_k: int

    def rows(self) -> Tensor:
        """[R, K], gathered."""
        return self.tokens.index_select(0, self.slot_of_row // self.top_k)


class Quantiser(NamedTuple):
    """Makes the operands of a recipe.

    Attributes:
        tokens: rows and columns of tokens, those that are wanted. Takes the recipe, the tokens, their split sizes,
            whether ``rows`` and ``columns`` are wanted, and whether the tokens are a gradient.
        weight: of a weight [E, N, K]. Takes the recipe, the weight, and whether the gradient of rows reads it, too.
    """

    tokens: Callable[..., tuple[Rows | None, Columns | None]]
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
    is_gathered = isinstance(tokens, GatheredTokens)
    number = tokens.slot_of_row.shape[0] if isinstance(tokens, GatheredTokens) else tokens.shape[0]
    dtype = tokens.tokens.dtype if isinstance(tokens, GatheredTokens) else tokens.dtype
    columns = wgrad and recipe.quantises_wgrad
    kept = tokens if not is_gathered and (values or (wgrad and not columns)) else None
    if not rows and not columns:
        return TokenCopies(number, dtype, kept, None, None)  # type: ignore[arg-type]
    quantiser = QUANTISERS[recipe.kernels(is_gradient)]
    read = quantiser.tokens(recipe, tokens, split_sizes, rows=rows, columns=columns, is_gradient=is_gradient)
    return TokenCopies(number, dtype, kept, *read)  # type: ignore[arg-type]


def weight_operands(recipe: Recipe, weight: Matrices, both: bool) -> WeightOperands:
    """What products read of a weight [E, N, K]; ``both``: the gradient of rows, too."""
    return QUANTISERS[recipe.kernels(False)].weight(recipe, weight, both)


# ---- kernels that write bytes


def _gathered(tokens: Tensor | GatheredTokens) -> tuple[Tensor, dict[str, Any]]:
    """The tokens, and what kernels take to gather them."""
    if isinstance(tokens, Tensor):
        return tokens, {}
    return tokens.tokens, {"slot_of_row": tokens.slot_of_row, "top_k": tokens.top_k}


def _tokens_in_blocks(
    recipe: Recipe,
    tokens: Tensor | GatheredTokens,
    split_sizes: Tensor,
    *,
    rows: bool,
    columns: bool,
    is_gradient: bool,
) -> tuple[Rows | None, Columns | None]:
    x, options = _gathered(tokens)
    options |= {"power_of_two": recipe.is_power_of_two, "want_rows": rows, "want_columns": columns}
    copies = quantize_rows(x, split_sizes, **options)
    return copies.rows, copies.columns


def _whole_tokens(
    recipe: Recipe,
    tokens: Tensor | GatheredTokens,
    split_sizes: Tensor,
    *,
    rows: bool,
    columns: bool,
    is_gradient: bool,
) -> tuple[Rows | None, Columns | None]:
    x, options = _gathered(tokens)
    options |= {"power_of_two": recipe.is_power_of_two, "want_rows": rows, "want_columns": columns}
    assert recipe.scaling is not None
    copies = quantize_whole_rows(x, split_sizes, scaling=recipe.scaling, encode=recipe.encode, **options)
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


# ---- kernels that write values


def _values_of_tokens(
    recipe: Recipe, tokens: Tensor | GatheredTokens, split_sizes: Tensor, **wanted: bool
) -> tuple[Rows | None, Columns | None]:
    x, options = _gathered(tokens)
    return quantized_values.of_tokens(recipe, x, split_sizes, **wanted, **options)


# ---- PyTorch, by the definition of the recipe


def _defined_tokens(
    recipe: Recipe,
    tokens: Tensor | GatheredTokens,
    split_sizes: Tensor,
    *,
    rows: bool,
    columns: bool,
    is_gradient: bool,
) -> tuple[Rows | None, Columns | None]:
    source = tokens if isinstance(tokens, Tensor) else tokens.rows()
    if not recipe.quantises_tokens:
        capture.refuse("products of packed weights are not replayed")
        return Rows(source), None
    capture.refuse(f"PyTorch quantises for {recipe.name}")
    read = recipe.token_operands(source, split_sizes, rows, columns, is_gradient)
    names = [name for name, is_wanted in (("rows", rows), ("columns", columns)) if is_wanted]
    _note(recipe, f"rows {'+'.join(names)}", nbytes(source, *(read[0] or ()), *(read[1] or ())))
    return read


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
    Scaling.VALUES: Quantiser(_values_of_tokens, quantized_values.of_weight),
    None: Quantiser(_defined_tokens, _defined_weight),
}
"""By what kernels scale; None: no kernel quantises."""
