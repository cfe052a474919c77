"""The three products of a grouped linear between :class:`QuantizedGroupedTensor`\\ s of one recipe.

``Float8Block``, and ``MXFP8(compute="fast")`` after regrouping, are multiplied as bytes. MXFP8 and NVFP4 are exact in
bfloat16, and are multiplied there; the scales of groups are factors of products. Others are multiplied in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import Layout, grouped_gemm
from .kernels.quantized import scaled_gemm, scaled_wgrad
from .quantized import mxfp8, nvfp4
from .quantized.copies import BLOCK, BlockedColumns, QuantizedRows, QuantizedWeight
from .quantized.mxfp8 import MXColumns, MXRows
from .quantized.nvfp4 import NVFP4Data
from .quantized.recipe import MXFP8, NVFP4, Float8Block
from .quantized_tensor import QuantizedGroupedTensor


class _Operand(NamedTuple):
    """What a product in 16 or 32 bits reads; ``amax`` [E] where the scale of a group is to be a factor."""

    values: Tensor
    amax: Tensor | None = None


def forward(x: QuantizedGroupedTensor, weight: QuantizedGroupedTensor) -> Tensor:
    """``y = x W^T``, of the rowwise copies: [T, N], of the dtype of ``x``; zero in the tail."""
    sizes = _sizes(x, weight)
    if _is_multiplied_as_bytes(x):
        rows, copies = _rows(x), _weight(weight)
        return scaled_gemm(*rows, copies.data, copies.scales, sizes, halves=weight.halves, out_dtype=x.dtype)
    return _product(Layout.NT, _rowwise(x), _rowwise(weight), sizes, x.dtype)


def input_grad(dy: QuantizedGroupedTensor, weight: QuantizedGroupedTensor) -> Tensor:
    """``dx = dy W``, of the rowwise copy of ``dy`` and the columnwise one of the weight: [T, K]; zero in the tail.

    Raises:
        ValueError: the two halves of a weight are no whole blocks, and bytes would be multiplied.
    """
    sizes = _sizes(dy, weight)
    if not _is_multiplied_as_bytes(dy):
        layout = Layout.NT if isinstance(dy.recipe, NVFP4) else Layout.NN
        return _product(layout, _rowwise(dy), _columnwise(weight), sizes, dy.dtype)
    if weight.halves > 1 and weight.shape[1] // weight.halves % BLOCK:
        raise ValueError(
            f"input_grad: halves of {weight.shape[1] // weight.halves} rows are no whole blocks of {BLOCK}"
        )
    rows, copies = _rows(dy), _weight(weight)
    assert copies.transposed is not None
    return scaled_gemm(*rows, copies.transposed, copies.scales.mT, sizes, out_dtype=dy.dtype)


def weight_grad(dy: QuantizedGroupedTensor, x: QuantizedGroupedTensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``dW = dy^T x`` of each group, of the columnwise copies: [E, N, K], of the dtype of ``x`` if none is given."""
    sizes, dtype = _sizes(dy, x), out_dtype or x.dtype
    if _is_multiplied_as_bytes(x):
        columns = *_blocked(dy), *_blocked(x)
        out = scaled_wgrad(*columns, sizes, rows=x.shape[0], out_dtype=dtype)
        assert isinstance(out, Tensor)
        return out
    if isinstance(x.recipe, NVFP4):
        sizes = nvfp4.filled_up(sizes)
    return _product(Layout.TN, _columnwise(dy), _columnwise(x), sizes, dtype)


def _sizes(tokens: QuantizedGroupedTensor, other: QuantizedGroupedTensor) -> Tensor:
    if tokens.recipe != other.recipe:
        raise ValueError(f"operands of one recipe are multiplied, got {tokens.recipe} and {other.recipe}")
    if tokens.first_dims is None:
        raise ValueError("the first operand must be tokens, with first_dims")
    return tokens.first_dims


def _is_multiplied_as_bytes(tensor: QuantizedGroupedTensor) -> bool:
    recipe = tensor.recipe
    return (isinstance(recipe, Float8Block) and recipe.gradient == "e4m3") or recipe == MXFP8("fast")


def _product(layout: Layout, a: _Operand, b: _Operand, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    alpha = None if a.amax is None or b.amax is None else nvfp4.product_factors(a.amax, b.amax)
    out = grouped_gemm(layout, a.values, b.values, sizes, alpha=alpha, out_dtype=dtype)
    assert isinstance(out, Tensor)
    return out


def _rowwise(tensor: QuantizedGroupedTensor) -> _Operand:
    """[T, K] or [E, N, K]."""
    data, scales = _present(tensor.rowwise, tensor.rowwise_scales)
    if isinstance(tensor.recipe, NVFP4):
        return _nvfp4(data, scales, tensor.rowwise_amax)
    return _Operand(tensor.dequantize(_wide(tensor), columnwise=False))


def _columnwise(tensor: QuantizedGroupedTensor) -> _Operand:
    """[T, K] or [E, N, K]; under NVFP4 [E, K, N], and tokens with each group filled up to blocks of 16."""
    data, scales = _present(tensor.columnwise, tensor.columnwise_scales)
    if not isinstance(tensor.recipe, NVFP4):
        return _Operand(tensor.dequantize(_wide(tensor), columnwise=True))
    operand = _nvfp4(data, scales, tensor.columnwise_amax)
    if tensor.first_dims is None:
        return operand
    return operand._replace(values=operand.values.transpose(1, 2).reshape(-1, tensor.shape[1]))


def _nvfp4(data: Tensor, scales: Tensor, amax: Tensor | None) -> _Operand:
    assert amax is not None
    return _Operand(nvfp4.dequantize(NVFP4Data(data, scales, amax)), amax)


def _wide(tensor: QuantizedGroupedTensor) -> torch.dtype:
    """A dtype in which the values are exact."""
    return torch.bfloat16 if isinstance(tensor.recipe, MXFP8) else torch.float32


def _rows(tensor: QuantizedGroupedTensor) -> QuantizedRows:
    data, scales = _present(tensor.rowwise, tensor.rowwise_scales)
    if isinstance(tensor.recipe, MXFP8):
        return mxfp8.regroup_rows(MXRows(data, scales))
    return QuantizedRows(data, scales)


def _blocked(tensor: QuantizedGroupedTensor) -> BlockedColumns:
    data, scales = _present(tensor.columnwise, tensor.columnwise_scales)
    assert tensor.first_dims is not None
    if isinstance(tensor.recipe, MXFP8):
        return mxfp8.regroup_columns(MXColumns(data, scales), tensor.first_dims)
    return BlockedColumns(data, scales)


def _weight(tensor: QuantizedGroupedTensor) -> QuantizedWeight:
    """Both orientations have the same bytes, so the columnwise copy of MXFP8 is not read."""
    data, scales = _present(tensor.rowwise, tensor.rowwise_scales)
    if isinstance(tensor.recipe, MXFP8):
        return mxfp8.regroup_weight(MXRows(data, scales), tensor.halves)
    transposed = data.mT.contiguous() if tensor.columnwise is None else tensor.columnwise
    return QuantizedWeight(data, transposed, scales)


def _present(data: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    if data is None or scales is None:
        raise ValueError("the copy that the product reads is not there: quantize it with rowwise= and columnwise=")
    return data, scales
