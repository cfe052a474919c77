"""The fake quantisers in PyTorch, on any device: the definitions in ``ops/formats``, into given memory."""

from __future__ import annotations

from torch import Tensor

from ...formats import mxfp8, nvfp4
from ...formats.copies import Columns, PackedFormat, Rows, Weight
from ..problems.fake_quantized import FakeQuantizeRows, FakeQuantizeWeight, FakeQuantizing
from ..problems.gemm import stacked

NAME = "torch"


def run(problem: FakeQuantizing) -> None:
    """Fills the tensors of the problem."""
    is_mx = problem.format is PackedFormat.MXFP8
    if isinstance(problem, FakeQuantizeWeight):
        (_mx_weight if is_mx else _nv_weight)(problem)
    else:
        (_mx_rows if is_mx else _nv_rows)(problem)


def _mx_rows(p: FakeQuantizeRows) -> None:
    x = p.gathered()
    if p.rows is not None:
        p.rows.copy_(mxfp8.dequantize_rows(mxfp8.quantize_rows(x)))
    if p.columns is not None:
        p.columns.copy_(mxfp8.dequantize_columns(mxfp8.quantize_columns(x, p.split_sizes), p.split_sizes))


def _nv_rows(p: FakeQuantizeRows) -> None:
    x = p.gathered()
    if p.rows is not None and p.row_amax is not None:
        _copy(nvfp4.quantize_rows(x, p.split_sizes, p.seed), p.rows, p.row_amax)
    if p.columns is not None and p.column_amax is not None:
        columns = nvfp4.quantize_columns(x, p.split_sizes, p.is_transformed, p.seed)
        _copy(columns, p.columns.view(-1, nvfp4.NV_BLOCK, x.shape[1]).transpose(1, 2), p.column_amax)


def _mx_weight(p: FakeQuantizeWeight) -> None:
    weight = stacked(p.weight)
    if p.rows is not None:
        p.rows.copy_(mxfp8.dequantize_rows(mxfp8.quantize_rows(weight)))
    if p.columns is not None:
        p.columns.copy_(mxfp8.dequantize_rows(mxfp8.quantize_rows(weight.mT)).mT)


def _nv_weight(p: FakeQuantizeWeight) -> None:
    copy = nvfp4.quantize_weight(stacked(p.weight))
    if p.rows is not None and p.amax is not None:
        _copy(copy, p.rows, p.amax)


def _copy(quantised: Rows | Columns | Weight, values: Tensor, amax: Tensor) -> None:
    """The values but for the factors of groups, and what these come from."""
    assert quantised.amax is not None
    values.copy_(nvfp4.dequantize(quantised))
    amax.copy_(quantised.amax)
