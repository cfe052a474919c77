"""The operands of recipes whose products are computed in 16 bits: values that kernels round to the recipe's formats."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...fuser.replay import capture
from ..formats.copies import ColumnValues, RowValues, TransposedValues, WeightOperand
from ..formats.nvfp4 import filled_up
from ..formats.operands import TokenOperands, WeightOperands
from ..formats.packed import PackedFormat
from ..formats.random import new_seed
from ..formats.recipe import MXFP8, NVFP4, Recipe
from ..kernels import Matrices
from ..kernels.doors.fake_quantized import fake_quantize_rows, fake_quantize_weight
from ..kernels.problems.gemm import first


def format_of(recipe: Recipe) -> PackedFormat | None:
    """What the values of a recipe are rounded to; None: its products are not computed in 16 bits."""
    if isinstance(recipe, NVFP4):
        return PackedFormat.NVFP4
    return PackedFormat.MXFP8 if recipe == MXFP8("exact") else None


def of_tokens(
    recipe: Recipe,
    format: PackedFormat,
    x: Tensor,
    split_sizes: Tensor,
    *,
    rows: bool,
    columns: bool,
    is_gradient: bool = False,
    **gathered: Any,
) -> TokenOperands:
    """The operands of tokens [T, K] that are wanted; with ``slot_of_row`` and ``top_k`` where they are gathered."""
    options: dict[str, Any] = {"want_rows": rows, "want_columns": columns, **gathered}
    sizes = split_sizes
    if isinstance(recipe, NVFP4):
        capture.refuse("PyTorch makes the factors of groups and the seeds of random numbers for NVFP4")
        seed = new_seed(x.device) if is_gradient and recipe.stochastic_rounding else None
        options |= {"is_transformed": recipe.hadamard, "seed": seed}
        sizes = filled_up(split_sizes) if columns else split_sizes
    values = fake_quantize_rows(x, split_sizes, format, **options)
    by_row = None if values.rows is None else RowValues(values.rows, values.row_amax)
    return TokenOperands(by_row, _columns(values.columns, sizes, values.column_amax))


def _columns(values: Tensor | None, split_sizes: Tensor, amax: Tensor | None) -> ColumnValues | None:
    return None if values is None else ColumnValues(values, split_sizes, amax)


def of_weight(format: PackedFormat, weight: Matrices, both: bool) -> WeightOperands:
    """The operands of a weight [E, N, K]; ``both``: also for the gradient of rows.

    Values lie as the weight does. Under NVFP4 the same ones serve both products, since blocks of 16 x 16 have one
    scale.
    """
    one = first(weight)
    is_turned = one.stride(-1) != 1 and one.stride(-2) == 1
    stored = _turned(weight) if is_turned else weight
    if format is PackedFormat.NVFP4:
        values, _, amax = fake_quantize_weight(stored, format)
        assert values is not None
        pair = WeightOperand(values, amax=amax), TransposedValues(values, amax)
        forward, backward = (pair[1].operand, pair[0]) if is_turned else pair
        return WeightOperands(forward, backward if both else None)
    rows, columns, _ = fake_quantize_weight(
        stored, format, want_rows=both or not is_turned, want_columns=both or is_turned
    )
    if is_turned:
        assert columns is not None
        return WeightOperands(TransposedValues(columns).operand, None if rows is None else WeightOperand(rows))
    assert rows is not None
    return WeightOperands(WeightOperand(rows), None if columns is None else TransposedValues(columns))


def _turned(weight: Matrices) -> Matrices:
    return weight.mT if isinstance(weight, Tensor) else [matrix.mT for matrix in weight]
