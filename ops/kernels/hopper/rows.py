"""Our own CUDA kernels that pass over rows once: activations, sums and products by group, and the zeroing of tails.

All but the sums and products write memory that the door has just allocated and no one else has seen, so its version
stays.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...programs.activations import CURVES
from ...values.activation_spec import ActivationSpec
from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream
from ..problems.gemm import ActivationGrads, Matrices, stacked
from ..problems.rows import Activating

_CURVES = {name: code for code, name in enumerate(CURVES)}


def activation_refusal(p: Activating) -> str | None:
    """Why the kernels do not compute the activation, or its backward; None: they do."""
    preact, scales, dtype = p.preact, p.scales, p.preact.dtype
    if (why := hardware_refusal(preact)) is not None:
        return why
    if dtype not in TYPE_CODES or not preact.is_contiguous():
        return f"needs dense rows of 16 or 32 bits, got {dtype} with strides {list(preact.stride())}"
    for tensor in p.beside:
        if tensor is not None and not (tensor.dtype == dtype and tensor.is_contiguous()):
            return f"needs dense rows of one dtype, got {dtype} and {tensor.dtype} with strides {list(tensor.stride())}"
    if scales is None or (scales.dtype in TYPE_CODES and scales.is_contiguous()):
        return None
    return f"needs dense scales of 16 or 32 bits, got {scales.dtype} with strides {list(scales.stride())}"


def groups_refusal(tokens: Tensor, split_sizes: Tensor | None, out: Tensor) -> str | None:
    """Why the kernels that know groups do not take these rows [T, N], of any pitch; None: they do."""
    if (why := hardware_refusal(tokens)) is not None:
        return why
    if tokens.stride(-1) != 1 and tokens.shape[-1] != 1:
        return f"needs dense rows, got strides {list(tokens.stride())}"
    dense = split_sizes is None or split_sizes.is_contiguous()
    if not dense or (split_sizes is not None and split_sizes.dtype not in (torch.int32, torch.int64)):
        return "needs contiguous int32 or int64 split sizes"
    if tokens.dtype not in TYPE_CODES or out.dtype not in TYPE_CODES:
        return f"needs rows of 16 or 32 bits, got {tokens.dtype} and {out.dtype}"
    return None


def forward(preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: Tensor) -> None:
    """``out`` [..., F] = activation of ``preact`` [..., C], times ``scales`` [...], rounded once."""
    scale, scales_type = scale_arguments(scales)
    compiled().activate(
        **_rows(preact, spec, out.shape[-1]),
        preact=preact.data_ptr(),
        postact=out.data_ptr(),
        scales=scale,
        scales_type=scales_type,
    )


def backward(
    dpostact: Tensor, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads
) -> None:
    """Computes the tensors in ``out`` from ``dpostact`` [..., F]; the activation is recomputed from ``preact``."""
    scale, scales_type = scale_arguments(scales)
    compiled().activate_backward(
        **_rows(preact, spec, dpostact.shape[-1]),
        dpostact=dpostact.data_ptr(),
        preact=preact.data_ptr(),
        scales=scale,
        scales_type=scales_type,
        dpreact=address(out.preact),
        dscales=address(out.scales),
        postact=address(out.postact),
    )


def column_sums(rows: Tensor, split_sizes: Tensor | None, out: Tensor, scale: Tensor | None) -> None:
    """``out[g]`` = the sum of the rows of group g [T, N], each times its ``scale``, in a fixed order.

    Without split sizes there is one group, of all rows.
    """
    scale = None if scale is None else scale.float().contiguous()
    groups = 1 if split_sizes is None else split_sizes.shape[0]
    size = compiled().column_sums_workspace(tokens=rows.shape[0], columns=rows.shape[1], groups=groups)
    workspace = rows.new_empty(size, dtype=torch.uint8)
    compiled().column_sums(
        **_of_groups(rows, split_sizes),
        scale=address(scale),
        out=out.data_ptr(),
        out_type=TYPE_CODES[out.dtype],
        workspace=workspace.data_ptr(),
    )
    torch.autograd.graph.increment_version(out)


def row_dots(rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""
    matrix = stacked(vectors)
    matrix = (matrix if matrix.dtype in (rows.dtype, torch.float32) else matrix.float()).contiguous()
    dots = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    compiled().row_dots(
        **_of_groups(rows, split_sizes),
        vectors=matrix.data_ptr(),
        vectors_type=TYPE_CODES[matrix.dtype],
        out=dots.data_ptr(),
    )
    if dots is not out:
        out.copy_(dots)
    torch.autograd.graph.increment_version(out)


def zero_tail(out: Tensor, split_sizes: Tensor) -> None:
    """Zeros the rows past the last group."""
    size, device = out.element_size(), out.get_device()
    compiled().zero_tail(
        device=device,
        stream=stream(device),
        data=out.data_ptr(),
        tokens=out.shape[0],
        row_bytes=out.shape[1] * size if out.dim() == 2 else size,
        pitch_bytes=out.stride(0) * size,
        groups=split_sizes.shape[0],
        sizes=split_sizes.data_ptr(),
        int64_sizes=split_sizes.dtype == torch.int64,
    )


class ActivationFields(NamedTuple):
    """An activation as the extension wants it, which goes by the order."""

    curve: int
    gated: bool
    alpha: float
    limit: float
    linear_offset: float
    block: int
    kernel: int = 0  # of a user's function, for the first tile variant of its direction
    other_kernel: int = 0  # for the second, if there is one
    deep_kernel: int = 0  # and for that of deep products, if there is one


@cache
def activation(spec: ActivationSpec, columns: int) -> ActivationFields:
    """An activation with that many output columns; of a user's function what does not depend on the kernel."""
    if spec.program is not None:
        return ActivationFields(0, spec.gated, 1.0, math.inf, 0.0, spec.block or columns)
    (curve, alpha), limit = spec.curve, math.inf if spec.limit is None else spec.limit
    return ActivationFields(_CURVES[curve], spec.gated, alpha, limit, spec.linear_offset, spec.block or columns)


def scale_arguments(scales: Tensor | None) -> tuple[int, int]:
    """A factor for each row, or none, as the extension wants it."""
    return (0, 0) if scales is None else (scales.data_ptr(), TYPE_CODES[scales.dtype])


def _rows(preact: Tensor, spec: ActivationSpec, columns: int) -> dict[str, Any]:
    device = preact.get_device()
    return {
        "activation": activation(spec, columns),
        "device": device,
        "stream": stream(device),
        "type": TYPE_CODES[preact.dtype],
        "rows": preact.numel() // max(1, preact.shape[-1]),
        "columns": columns,
    }


def _of_groups(rows: Tensor, split_sizes: Tensor | None) -> dict[str, Any]:
    device = rows.get_device()
    return {
        "device": device,
        "stream": stream(device),
        "rows": rows.data_ptr(),
        "type": TYPE_CODES[rows.dtype],
        "tokens": rows.shape[0],
        "columns": rows.shape[1],
        "pitch": rows.stride(0),
        "groups": 1 if split_sizes is None else split_sizes.shape[0],
        "sizes": address(split_sizes),
        "int64_sizes": split_sizes is not None and split_sizes.dtype == torch.int64,
    }
