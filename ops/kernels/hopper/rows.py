"""Our own CUDA kernels that pass over rows once: activations, sums and products by group, and the zeroing of tails.

All but the sums and products write what the door has just allocated, whose version nobody has kept: it stays.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ...activation_spec import ActivationSpec
from ..problem import ActivationGrads, Matrices, stacked
from ..pytorch.activation import QUICK
from .extension import TYPE_CODES, address, compiled, device_refusal, stream

NAME = "activation"
_CURVES = {"silu": 0, "quick_gelu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "sigmoid": 5}


def activation_refusal(preact: Tensor, scales: Tensor | None, *rows: Tensor | None) -> str | None:
    """Why the kernels do not compute the activation of ``preact`` with ``rows`` beside it; None: they do."""
    if (why := _device_refusal(preact)) is not None:
        return why
    dtype = preact.dtype
    if dtype not in TYPE_CODES or not preact.is_contiguous():
        return f"needs dense rows of 16 or 32 bits, got {dtype} with strides {list(preact.stride())}"
    for tensor in rows:
        if tensor is not None and not (tensor.dtype == dtype and tensor.is_contiguous()):
            return f"needs dense rows of one dtype, got {dtype} and {tensor.dtype} with strides {list(tensor.stride())}"
    if scales is None or (scales.dtype in TYPE_CODES and scales.is_contiguous()):
        return None
    return f"needs dense scales of 16 or 32 bits, got {scales.dtype} with strides {list(scales.stride())}"


def groups_refusal(tokens: Tensor, split_sizes: Tensor, out: Tensor) -> str | None:
    """Why the kernels that know groups do not take these rows [T, N], of any pitch; None: they do."""
    if (why := _device_refusal(tokens)) is not None:
        return why
    if tokens.stride(-1) != 1 and tokens.shape[-1] != 1:
        return f"needs dense rows, got strides {list(tokens.stride())}"
    if split_sizes.dtype not in (torch.int32, torch.int64) or not split_sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    if tokens.dtype not in TYPE_CODES or out.dtype not in TYPE_CODES:
        return f"needs rows of 16 or 32 bits, got {tokens.dtype} and {out.dtype}"
    return None


def _device_refusal(rows: Tensor) -> str | None:
    return device_refusal(rows.get_device()) if rows.is_cuda else f"needs a CUDA device, got {rows.device.type}"


def forward(preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: Tensor) -> None:
    """``out`` [..., F] = activation of ``preact`` [..., C], times ``scales`` [...], rounded once."""
    columns = out.shape[-1]
    addresses = preact.data_ptr(), *scale_arguments(scales), out.data_ptr()
    compiled().activate(*curve_arguments(spec, columns), *_rows(preact, columns), *addresses)


def backward(
    dpostact: Tensor, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads
) -> None:
    """From ``dpostact`` [..., F] what ``out`` holds tensors for; the activation is computed again from ``preact``."""
    columns = dpostact.shape[-1]
    inputs = dpostact.data_ptr(), preact.data_ptr(), *scale_arguments(scales)
    grads = map(address, (out.preact, out.scales, out.postact))
    compiled().activate_backward(*curve_arguments(spec, columns), *_rows(preact, columns), *inputs, *grads)


def column_sums(rows: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """``out[g]`` = the sum of the rows of group g [T, N], each times its ``scale``, in a fixed order."""
    scale = None if scale is None else scale.float().contiguous()
    (tokens, columns), groups = rows.shape, split_sizes.shape[0]
    workspace = rows.new_empty(compiled().column_sums_workspace(tokens, columns, groups), dtype=torch.uint8)
    factors = address(scale)
    compiled().column_sums(
        *_of_groups(rows, split_sizes), factors, out.data_ptr(), TYPE_CODES[out.dtype], workspace.data_ptr()
    )
    torch.autograd.graph.increment_version(out)


def row_dots(rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""
    matrix = stacked(vectors)
    matrix = (matrix if matrix.dtype in (rows.dtype, torch.float32) else matrix.float()).contiguous()
    dots = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    compiled().row_dots(*_of_groups(rows, split_sizes), matrix.data_ptr(), TYPE_CODES[matrix.dtype], dots.data_ptr())
    if dots is not out:
        out.copy_(dots)
    torch.autograd.graph.increment_version(out)


def zero_tail(out: Tensor, split_sizes: Tensor) -> None:
    """Zeros the rows past the last group."""
    size, device = out.element_size(), out.get_device()
    row_bytes = out.shape[1] * size if out.dim() == 2 else size
    rows = out.data_ptr(), out.shape[0], row_bytes, out.stride(0) * size
    is_int64 = split_sizes.dtype == torch.int64
    compiled().zero_tail(device, stream(device), *rows, split_sizes.data_ptr(), split_sizes.shape[0], is_int64)


@cache
def curve_arguments(spec: ActivationSpec, columns: int) -> tuple[int, bool, float, float, float, int]:
    """An activation with that many output columns, as the extension wants it."""
    alpha = QUICK if spec.name == "quick_gelu" else spec.alpha
    limit = math.inf if spec.limit is None else spec.limit
    return _CURVES[spec.name], spec.gated, alpha, limit, spec.linear_offset, spec.block or columns


def scale_arguments(scales: Tensor | None) -> tuple[int, int]:
    """A factor for each row, or none, as the extension wants it."""
    return (0, 0) if scales is None else (scales.data_ptr(), TYPE_CODES[scales.dtype])


def _rows(preact: Tensor, columns: int) -> tuple[int, int, int, int, int]:
    device = preact.get_device()
    return device, stream(device), TYPE_CODES[preact.dtype], preact.numel() // max(1, preact.shape[-1]), columns


def _of_groups(rows: Tensor, split_sizes: Tensor) -> tuple[int, int, int, int, int, int, int, int, int, bool]:
    dense = (
        rows.get_device(),
        stream(rows.get_device()),
        rows.data_ptr(),
        TYPE_CODES[rows.dtype],
        *rows.shape,
        rows.stride(0),
    )
    return (*dense, split_sizes.data_ptr(), split_sizes.shape[0], split_sizes.dtype == torch.int64)
