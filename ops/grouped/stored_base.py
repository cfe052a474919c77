"""Products of rows with a weight that stays in 8 or 4 bits beside an adapter.

In a format of weights alone the weight is decoded for each product, which then is one of 16 bits. In 8 bits whose rows
are quantised, the bytes are multiplied, and the low-rank product is added to the result: it reads what was not rounded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import kernels
from ..formats.copies import Transposition, Weight
from ..formats.recipe import Recipe
from ..formats.weight_only import WeightOnly
from ..kernels import Layout, Matrices, OperandPair
from ..kernels.doors.decoding import decoding_runs
from ..quantized.linear import decoded, decoded_product, product, transposed_operand
from ..quantized.operands import tokens_for


def values_of(weight: Matrices | Weight | None, recipe: Recipe | None, like: Tensor) -> Matrices:
    """A weight [E, N, K] for a product of rows like these: as it is, or decoded for it if it is stored."""
    assert weight is not None
    if not isinstance(weight, Weight):
        return weight
    assert recipe is not None
    return decoded(recipe, weight, like)


def multiplies_apart(weight: Matrices | Weight | None, recipe: Recipe | None, like: Tensor) -> bool:
    """Whether products of a weight with such rows end without an epilogue: of its bytes, or of several runs."""
    if not isinstance(weight, Weight):
        return False
    return not isinstance(recipe, WeightOnly) or len(decoding_runs(weight.data, recipe.values_in_byte, like)) > 1


def weight_product(
    layout: Layout, rows: Tensor, weight: Matrices | Weight | None, recipe: Recipe | None, sizes: Tensor, **options: Any
) -> Tensor:
    """The product of rows and a weight as it is, or decoded for it; with options of :func:`kernels.grouped_gemm`."""
    assert weight is not None
    if isinstance(weight, Weight):
        assert recipe is not None
        return decoded_product(layout, rows, recipe, weight, sizes, **options)
    y = kernels.grouped_gemm(layout, rows, weight, sizes, **options)
    assert isinstance(y, Tensor)
    return y


def quantized_product(recipe: Recipe, weight: Weight, rows: Tensor, split_sizes: Tensor, **bias: Any) -> Tensor:
    """``x W^T`` by group, of rows that are quantised for it, plus the bias; of the dtype of the rows."""
    read = tokens_for(None, recipe, rows, split_sizes, rows=True, wgrad=False).rows
    assert read is not None
    return product(recipe, read, recipe.stored_operand(weight), split_sizes, rows.dtype, **bias)


def quantized_gradient(recipe: Recipe, weight: Weight, dy: Tensor, split_sizes: Tensor) -> Tensor:
    """``dy W`` by group, of a gradient that is quantised for it."""
    read = tokens_for(None, recipe, dy, split_sizes, rows=True, wgrad=False, is_gradient=True).rows
    assert read is not None
    turned = transposed_operand(recipe, weight._replace(turn=Transposition.COPY))
    return product(recipe, read, turned, split_sizes, dy.dtype)


def add_low_rank(y: Tensor, pair: OperandPair | None, layout: Layout, split_sizes: Tensor) -> Tensor:
    """Adds the product of the pair to the rows of the groups; ``y`` as it is without one."""
    if pair is None:
        return y
    summed = kernels.grouped_gemm(layout, pair.a, pair.b, split_sizes, out=y, beta=1.0)
    assert isinstance(summed, Tensor)
    return summed
