"""Operands of formats that kernels emulate: values rounded to the format, which are multiplied in 16 bits."""

from __future__ import annotations

from torch import Tensor

from ..formats.copies import Columns, Rows, Scaling, Transposition, Weight, WeightOperands
from ..formats.recipe import Recipe
from ..kernels import Matrices
from ..kernels.doors.fake_quantized import fake_quantize_rows, fake_quantize_weight
from ..kernels.problems.gemm import first
from .operands import GatheredTokens, Quantiser, TokenOperands, WantedOperands


def _tokens(recipe: Recipe, tokens: GatheredTokens, split_sizes: Tensor, wanted: WantedOperands) -> TokenOperands:
    assert recipe.packed is not None
    values = fake_quantize_rows(
        tokens.tokens,
        split_sizes,
        recipe.packed,
        want_rows=wanted.rows,
        want_columns=wanted.columns,
        slot_of_row=tokens.slot_of_row,
        top_k=tokens.top_k,
        **recipe.rounding(tokens.tokens, wanted.is_gradient),
    )
    rows = None if values.rows is None else Rows(values.rows, None, values.row_amax)
    if values.columns is None:
        return rows, None
    return rows, Columns(values.columns, None, values.column_amax, recipe.filled_sizes(split_sizes))


def _weight(recipe: Recipe, weight: Matrices, both: bool) -> WeightOperands:
    """Values lie as the weight does. The same ones serve both products where a scale is of square blocks."""
    one, format = first(weight), recipe.packed
    assert format is not None
    is_turned = one.stride(-1) != 1 and one.stride(-2) == 1
    stored = _turned(weight) if is_turned else weight
    if recipe.has_square_blocks:
        values, _, amax = fake_quantize_weight(stored, format)
        assert values is not None
        pair = Weight(values, None, amax), Weight(values, None, amax, turn=Transposition.VIEW)
        forward, backward = (pair[1].viewed(), pair[0]) if is_turned else pair
        return WeightOperands(forward, backward if both else None)
    wanted = {"want_rows": both or not is_turned, "want_columns": both or is_turned}
    rows, columns, _ = fake_quantize_weight(stored, format, **wanted)
    by_row = None if rows is None else Weight(rows)
    by_column = None if columns is None else Weight(columns, turn=Transposition.VIEW)
    if is_turned:
        by_row, by_column = by_column, by_row
    assert by_row is not None
    return WeightOperands(by_row.viewed(), by_column)


def _turned(weight: Matrices) -> Matrices:
    return weight.mT if isinstance(weight, Tensor) else [matrix.mT for matrix in weight]


EMULATED: dict[Scaling | None, Quantiser] = {Scaling.VALUES: Quantiser(_tokens, _weight)}
"""The quantisers of emulated formats, which ``ops/__init__.py`` registers."""
