"""The three products of a grouped linear between :class:`QuantizedGroupedTensor`\\ s of one recipe.

They are those of linears; see ``quantized/linear.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.copies import BLOCK, Columns, Rows, Weight
from ..kernels.doors.transposition import transpose_bytes
from ..values.checks import is_free_to_read
from .linear import product
from .linear import weight_grad as multiplied_columns
from .tensor import QuantizedGroupedTensor


def forward(x: QuantizedGroupedTensor, weight: QuantizedGroupedTensor) -> Tensor:
    """``y = x W^T`` [T, N], from the rowwise copies, in the dtype of ``x``; zero in the tail.

    Raises:
        ValueError: operands that do not fit one another.
    """
    sizes = _sizes("forward", x, weight, (x.num_groups, None, x.shape[-1]))
    parts = weight.halves if _has_blocks_of_rows(weight) else 1
    operand = weight.recipe.weight_operand(_weight(weight, "rowwise"), weight.halves)
    return product(x.recipe, _rows(x, sizes), operand, sizes, x.dtype, parts=parts)


def input_grad(dy: QuantizedGroupedTensor, weight: QuantizedGroupedTensor) -> Tensor:
    """``dx = dy W`` [T, K], from the rowwise copy of ``dy`` and the columnwise copy of the weight; zero in the tail.

    If both copies of a weight have the same bytes, the rowwise copy serves for both.

    Raises:
        ValueError: operands do not fit one another; or bytes would be multiplied, and the halves of the weight are not
            whole blocks.
    """
    sizes = _sizes("input_grad", dy, weight, (dy.num_groups, dy.shape[-1], None))
    if _has_blocks_of_rows(weight) and weight.halves > 1 and weight.shape[1] // weight.halves % BLOCK:
        raise ValueError(
            f"input_grad: halves of {weight.shape[1] // weight.halves} rows are not whole blocks of {BLOCK}"
        )
    if weight.recipe.has_one_copy:
        operand = weight.recipe.turned(_weight(weight, "rowwise"), weight.halves, transpose_bytes)
    else:
        operand = weight.recipe.transposed_operand(_weight(weight, "columnwise"))
    return product(dy.recipe, _rows(dy, sizes), operand, sizes, dy.dtype)


def weight_grad(dy: QuantizedGroupedTensor, x: QuantizedGroupedTensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``dW = dy^T x`` of each group, of the columnwise copies: [E, N, K], of the dtype of ``x`` if none is given.

    Raises:
        ValueError: operands that do not fit one another.
    """
    sizes, rows = _sizes("weight_grad", dy, x, (dy.shape[0], None)), x.shape[0]
    if x.first_dims is not sizes and (x.first_dims is None or x.first_dims.shape != sizes.shape or not _equal(dy, x)):
        raise ValueError("weight_grad: dy and x must have the same first_dims")
    a, b = (t.recipe.column_operand(Columns(*_present(t, "columnwise")), sizes, rows) for t in (dy, x))
    out = multiplied_columns(a, b, sizes, rows, out_dtype=out_dtype or x.dtype)
    assert isinstance(out, Tensor)
    return out


def _sizes(
    product: str, tokens: QuantizedGroupedTensor, other: QuantizedGroupedTensor, shape: tuple[int | None, ...]
) -> Tensor:
    """The tokens of each group of two operands; ``shape`` is the second operand's, None where it is free.

    Kernels read memory by these sizes.
    """
    for operand in (tokens, other):
        if not isinstance(operand, QuantizedGroupedTensor):
            raise ValueError(f"{product}: expected a QuantizedGroupedTensor, got a {type(operand).__name__}")
    if tokens.recipe != other.recipe:
        raise ValueError(f"{product}: operands of one recipe are multiplied, got {tokens.recipe} and {other.recipe}")
    if tokens.first_dims is None:
        raise ValueError(f"{product}: the first operand must be tokens, with first_dims")
    fits = len(other.shape) == len(shape) and all(a in (None, b) for a, b in zip(shape, other.shape, strict=True))
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{product}: with a first operand of {list(tokens.shape)} in {tokens.num_groups} groups the second must "
            f"have shape [{expected}], got {list(other.shape)}"
        )
    return tokens.first_dims


def _equal(a: QuantizedGroupedTensor, b: QuantizedGroupedTensor) -> bool:
    """Whether groups have the same tokens; so it is taken to be where one would have to wait for a device."""
    assert a.first_dims is not None
    assert b.first_dims is not None
    is_free = is_free_to_read(a.first_dims) and is_free_to_read(b.first_dims)
    return not is_free or a.first_dims.tolist() == b.first_dims.tolist()


def _has_blocks_of_rows(weight: QuantizedGroupedTensor) -> bool:
    """Whether several rows of the multiplied weight share a scale."""
    return weight.recipe.has_square_blocks and weight.recipe.packed is None


def _rows(tokens: QuantizedGroupedTensor, sizes: Tensor) -> Rows:
    return tokens.recipe.row_operand(Rows(*_present(tokens, "rowwise")), sizes)


def _weight(tensor: QuantizedGroupedTensor, name: str) -> Weight:
    return Weight(*_present(tensor, name))


def _present(tensor: QuantizedGroupedTensor, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    data, scales = getattr(tensor, name), getattr(tensor, f"{name}_scales")
    if data is None or scales is None:
        raise ValueError("the copy that the product reads is missing; quantize with rowwise= and columnwise=")
    return data, scales, getattr(tensor, f"{name}_amax")
