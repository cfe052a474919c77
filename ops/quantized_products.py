"""The three products of a grouped linear between :class:`QuantizedGroupedTensor`\\ s of one recipe.

They are those of linears; see ``quantized_linear.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantized import operands
from .quantized.copies import BLOCK, Rows
from .quantized.recipe import MXFP8, Float8Block
from .quantized.schemes import Copy
from .quantized_linear import product
from .quantized_linear import weight_grad as multiplied_columns
from .quantized_tensor import QuantizedGroupedTensor


def forward(x: QuantizedGroupedTensor, weight: QuantizedGroupedTensor) -> Tensor:
    """``y = x W^T``, of the rowwise copies: [T, N], of the dtype of ``x``; zero in the tail."""
    sizes = _sizes(x, weight)
    options = {"halves": weight.halves} if _has_blocks_of_rows(weight) else {}
    operand = operands.of_rowwise(weight.recipe, _present(weight, "rowwise"), weight.halves)
    return product(x.recipe, _rows(x, sizes), operand, sizes, x.dtype, **options)


def input_grad(dy: QuantizedGroupedTensor, weight: QuantizedGroupedTensor) -> Tensor:
    """``dx = dy W``, of the rowwise copy of ``dy`` and the columnwise one of the weight: [T, K]; zero in the tail.

    Where both copies of a weight have the same bytes, the rowwise one may stand for the other.

    Raises:
        ValueError: the two halves of a weight are no whole blocks, and bytes would be multiplied.
    """
    sizes = _sizes(dy, weight)
    if _has_blocks_of_rows(weight) and weight.halves > 1 and weight.shape[1] // weight.halves % BLOCK:
        raise ValueError(
            f"input_grad: halves of {weight.shape[1] // weight.halves} rows are no whole blocks of {BLOCK}"
        )
    if operands.has_one_copy(weight.recipe):
        operand = operands.turned(weight.recipe, _present(weight, "rowwise"), weight.halves)
    else:
        operand = operands.of_columnwise(weight.recipe, _present(weight, "columnwise"))
    return product(dy.recipe, _rows(dy, sizes), operand, sizes, dy.dtype)


def weight_grad(dy: QuantizedGroupedTensor, x: QuantizedGroupedTensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``dW = dy^T x`` of each group, of the columnwise copies: [E, N, K], of the dtype of ``x`` if none is given."""
    sizes, rows = _sizes(dy, x), x.shape[0]
    a, b = (operands.of_column_copy(t.recipe, _present(t, "columnwise"), sizes, rows) for t in (dy, x))
    out = multiplied_columns(a, b, sizes, rows, out_dtype=out_dtype or x.dtype)
    assert isinstance(out, Tensor)
    return out


def _sizes(tokens: QuantizedGroupedTensor, other: QuantizedGroupedTensor) -> Tensor:
    if tokens.recipe != other.recipe:
        raise ValueError(f"operands of one recipe are multiplied, got {tokens.recipe} and {other.recipe}")
    if tokens.first_dims is None:
        raise ValueError("the first operand must be tokens, with first_dims")
    return tokens.first_dims


def _has_blocks_of_rows(weight: QuantizedGroupedTensor) -> bool:
    """Whether a scale of the weight that is multiplied is of several of its rows."""
    return isinstance(weight.recipe, Float8Block) or weight.recipe == MXFP8("fast")


def _rows(tokens: QuantizedGroupedTensor, sizes: Tensor) -> Rows:
    return operands.of_row_copy(tokens.recipe, _present(tokens, "rowwise"), sizes)


def _present(tensor: QuantizedGroupedTensor, name: str) -> Copy:
    data, scales = getattr(tensor, name), getattr(tensor, f"{name}_scales")
    if data is None or scales is None:
        raise ValueError("the copy that the product reads is not there: quantize it with rowwise= and columnwise=")
    return Copy(data, scales, getattr(tensor, f"{name}_amax"))
