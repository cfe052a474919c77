"""The operands of recipes whose products are computed in 16 bits: values that kernels round to the recipe's format."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .kernels import Matrices
from .kernels.fake_quantized import fake_quantize_rows, fake_quantize_weight
from .kernels.problem import first
from .quantized.copies import Columns, Rows, Transposition, Weight, WeightOperands
from .quantized.recipe import Recipe


def of_tokens(
    recipe: Recipe, x: Tensor, split_sizes: Tensor, *, rows: bool, columns: bool, is_gradient: bool, **gathered: Any
) -> tuple[Rows | None, Columns | None]:
    """The operands of tokens [T, K] that are wanted; with ``slot_of_row`` and ``top_k`` where they are gathered."""
    options: dict[str, Any] = {"want_rows": rows, "want_columns": columns, **gathered}
    options |= recipe.rounding(x, is_gradient)
    sizes = recipe.filled_sizes(split_sizes) if columns else split_sizes
    assert recipe.packed is not None
    values = fake_quantize_rows(x, split_sizes, recipe.packed, **options)
    by_row = None if values.rows is None else Rows(values.rows, None, values.row_amax)
    by_column = None if values.columns is None else Columns(values.columns, None, values.column_amax, sizes)
    return by_row, by_column


def of_weight(recipe: Recipe, weight: Matrices, both: bool) -> WeightOperands:
    """The operands of a weight [E, N, K]; ``both``: also for the gradient of rows.

    Values lie as the weight does. The same ones serve both products where a scale is of as many rows as columns.
    """
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
