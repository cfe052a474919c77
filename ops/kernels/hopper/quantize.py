"""Our own CUDA kernels that quantise: each reads its tensor once, or twice for scales of whole rows or groups, and
writes both operands.

They write memory that the door has just allocated and no one else has seen, so its version stays, and its form needs no
check. Rows past the last group are neither read nor written.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.copies import BLOCK, Columns, Rows, Scaling, ceil_blocks
from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream
from ..problems.gemm import Matrices, addresses, first
from ..problems.quantized import (
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizedWeight,
    QuantizeRows,
    QuantizeWeight,
    Quantizing,
    RowWeight,
)
from . import quantized_functions
from .gemm import MAX_GROUPS
from .rows import scale_arguments

_VECTOR = 16  # bytes that are moved at once: a number of features and an address are multiples of it
_MANY = 2**30  # rows: those of a group are numbers of 32 bits
_SCALING_CODES = {Scaling.BLOCKS: 0, Scaling.ROWS: 1, Scaling.GROUPS: 2}


def refusal(problem: Quantizing) -> str | None:
    """Why the kernels do not quantise this; None: they do."""
    return hardware_refusal(problem.tensor) or _refusal(problem)


@singledispatch
def _refusal(problem: Quantizing) -> str | None:
    """The reason for the operands of each kind of problem."""
    raise TypeError(f"no quantiser of {type(problem).__name__}")


@singledispatch
def run(problem: Quantizing) -> None:
    """Fills the copies of a problem that is not refused."""
    raise TypeError(f"no quantiser of {type(problem).__name__}")


@_refusal.register
def _rows_refusal(problem: QuantizeRows) -> str | None:
    x, tokens = problem.x, problem.tokens
    return (
        (rows_refusal(x) if problem.exponents is None else _bytes_refusal(problem, problem.exponents))
        or tokens_refusal(tokens, problem.split_sizes)
        or features_refusal(x.shape[1])
        or indices_refusal(problem.slot_of_row)
        or _encode_refusal(problem.encode, problem.scaling, problem.split_sizes.shape[0])
    )


def rows_refusal(x: Tensor) -> str | None:
    """The reason against rows of tokens, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"quantises bfloat16 or float16 rows, not {x.dtype}"
    if x.stride(1) != 1 or x.stride(0) % 8 or addresses(x)[0] % _VECTOR:
        return f"needs dense rows at multiples of 16 bytes, got strides {list(x.stride())}"
    return None


def _bytes_refusal(problem: QuantizeRows, exponents: Tensor) -> str | None:
    """The reason against rows of e4m3, or None."""
    x, shape = problem.x, (problem.x.shape[0], ceil_blocks(problem.x.shape[1]))
    if problem.rows is not None or problem.slot_of_row is not None or problem.scaling is not Scaling.BLOCKS:
        return "makes of rows of bytes their columns alone, with the scales of blocks"
    if x.dtype != torch.float8_e4m3fn or x.stride(1) != 1 or x.stride(0) % 8 or addresses(x)[0] % 8:
        return f"needs rows of e4m3 at multiples of 8 bytes, got {x.dtype} with strides {list(x.stride())}"
    if exponents.dtype != torch.uint8 or exponents.shape != shape or exponents.stride() != x.stride():
        return f"needs exponents {list(shape)} of 8 bits at the strides of the rows, got {list(exponents.shape)}"
    return None


def _encode_refusal(encode: Tensor | None, scaling: Scaling, groups: int) -> str | None:
    """The reason against the factors of groups, or None."""
    if encode is None:
        return None
    if scaling is not Scaling.GROUPS:
        return f"takes numbers to multiply groups by where groups have the scales, not {scaling.value}"
    if encode.dtype == torch.float32 and encode.shape == (groups,) and encode.is_contiguous():
        return None
    return f"needs [{groups}] dense float32 numbers to multiply groups by, got {list(encode.shape)} of {encode.dtype}"


def indices_refusal(*indices: Tensor | None) -> str | None:
    """The reason against indices of rows or slots, or None."""
    for each in indices:
        if each is not None and not (each.dtype == torch.int32 and each.is_contiguous()):
            return f"needs dense indices of 32 bits, got {each.dtype} with strides {list(each.stride())}"
    return None


def tokens_refusal(tokens: int, split_sizes: Tensor) -> str | None:
    """The reason against the number of rows or their groups, or None."""
    if tokens >= _MANY:
        return f"takes fewer than 2^30 rows, got {tokens}"
    if split_sizes.dtype not in (torch.int32, torch.int64) or not split_sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    return None


def features_refusal(features: int) -> str | None:
    """Why the kernels do not take these columns, or None."""
    return None if features % _VECTOR == 0 else f"needs features that are multiples of 16, got {features}"


@run.register
def _quantize_rows(problem: QuantizeRows) -> None:
    x, sizes, device = problem.x, problem.split_sizes, problem.x.get_device()
    amax = _largest_magnitudes(problem.scaling, problem.tokens, sizes.shape[0], x)
    compiled().quantize_rows(
        device=device,
        stream=stream(device),
        type=TYPE_CODES[torch.bfloat16 if problem.exponents is not None else x.dtype],
        tokens=problem.tokens,
        features=x.shape[1],
        x=x.data_ptr(),
        pitch=x.stride(0),
        **group_arguments(sizes),
        power_of_two=problem.power_of_two,
        **_copy_arguments(problem.rows, problem.columns),
        exponents=address(problem.exponents),
        slot_of_row=address(problem.slot_of_row),
        top_k=problem.top_k,
        scaling=_SCALING_CODES[problem.scaling],
        amax=address(amax),
        encode=address(problem.encode),
    )


def _largest_magnitudes(scaling: Scaling, rows: int, groups: int, like: Tensor) -> Tensor | None:
    """Memory for the largest magnitudes of rows and columns, or of groups; sized at every call, like
    :func:`_workspace`.
    """
    if scaling is Scaling.BLOCKS:
        return None
    code, features = _SCALING_CODES[scaling], like.shape[-1]
    size = compiled().quantize_workspace(scaling=code, rows=rows, groups=groups, features=features)
    return like.new_empty(size, dtype=torch.uint8)


def group_arguments(split_sizes: Tensor) -> dict[str, int]:
    """The launch arguments about groups."""
    return {
        "groups": split_sizes.shape[0],
        "sizes": split_sizes.data_ptr(),
        "int64_sizes": split_sizes.dtype == torch.int64,
    }


def _copy_arguments(rows: Rows | None, columns: Columns | None) -> dict[str, int]:
    row_data, row_scales, *_ = rows or (None, None)
    column_data, column_scales, *_ = columns or (None, None)
    return {
        "rows": address(row_data),
        "row_scales": address(row_scales),
        "columns": address(column_data),
        "column_scales": address(column_scales),
    }


class _Stored(NamedTuple):
    """Matrices [n, k] in their stored layout, and the destination of their bytes.

    Attributes:
        matrices: row-major.
        is_transposed: whether they, and their scales, are transposed.
    """

    matrices: list[Tensor]
    groups: int
    group_stride: int
    data: Tensor | None
    transposed: Tensor | None
    scales: Tensor | None
    transposed_scales: Tensor | None
    is_transposed: bool


def _stored(weight: Matrices, out: QuantizedWeight | RowWeight) -> _Stored:
    """The matrices, or their transposes where those are row-major."""
    one = first(weight)
    is_transposed = one.stride(-1) != 1 and one.stride(-2) == 1
    stacked = isinstance(weight, Tensor)
    matrices = [weight] if isinstance(weight, Tensor) else list(weight)
    data, transposed = (out.transposed, out.data) if is_transposed else (out.data, out.transposed)
    scales: tuple[Tensor | None, Tensor | None] = out.scales, None
    if isinstance(out, RowWeight):
        scales = out.scales, out.transposed_scales
        scales = (scales[1], scales[0]) if is_transposed else scales
    return _Stored(
        [matrix.mT for matrix in matrices] if is_transposed else matrices,
        one.shape[0] if stacked else len(matrices),
        one.stride(0) if stacked else 0,
        data,
        transposed,
        *scales,
        is_transposed,
    )


@_refusal.register
def _weight_refusal(problem: QuantizeWeight) -> str | None:
    one, halves = first(problem.weight), problem.halves
    stored, k, half_rows = _stored(problem.weight, problem.out), one.shape[-1], one.shape[-2] // halves
    why = matrices_refusal(stored.matrices, stored.group_stride) or features_refusal(k) or features_refusal(half_rows)
    if why is None and stored.is_transposed and halves == 2 and half_rows % BLOCK:
        why = f"needs halves that are multiples of 128 of a weight that is stored transposed, got {half_rows}"
    return why or _encode_refusal(problem.encode, problem.scaling, stored.groups)


def matrices_refusal(matrices: list[Tensor], group_stride: int) -> str | None:
    """The reason against row-major weights in one tensor [E, N, K] or one per group, or None."""
    one = matrices[0]
    if any([m.dtype != one.dtype or m.stride() != one.stride() for m in matrices]):
        return "needs weights of one dtype and pitch"
    if one.dtype not in TYPE_CODES:
        return f"quantises weights of 16 or 32 bits, not {one.dtype}"
    if len(matrices) > MAX_GROUPS:
        return f"takes at most {MAX_GROUPS} matrices, got {len(matrices)}"
    size = one.element_size()
    aligned = (one.stride(-2) * size, group_stride * size, *addresses(matrices))
    if one.stride(-1) != 1 or any([number % _VECTOR for number in aligned]):
        return f"needs dense rows at multiples of 16 bytes, got strides {list(one.stride())}"
    return None


@run.register
def _quantize_weight(problem: QuantizeWeight) -> None:
    stored = _stored(problem.weight, problem.out)
    one = stored.matrices[0]
    device, (n, k), is_stacked = one.get_device(), one.shape[-2:], isinstance(problem.weight, Tensor)
    amax = _largest_magnitudes(problem.scaling, stored.groups * n, stored.groups, one)
    compiled().quantize_weight(
        device=device,
        stream=stream(device),
        type=TYPE_CODES[one.dtype],
        groups=stored.groups,
        n=n,
        k=k,
        weight=one.data_ptr() if is_stacked else 0,
        pitch=one.stride(-2),
        group_stride=stored.group_stride,
        addresses=[] if is_stacked else [matrix.data_ptr() for matrix in stored.matrices],
        halves=1 if stored.is_transposed or problem.scaling is not Scaling.BLOCKS else problem.halves,
        power_of_two=problem.power_of_two,
        data=address(stored.data),
        transposed=address(stored.transposed),
        scales=address(stored.scales),
        scales_transposed=stored.is_transposed,
        scaling=_SCALING_CODES[problem.scaling],
        amax=address(amax),
        encode=address(problem.encode),
        transposed_scales=address(stored.transposed_scales),
    )


@_refusal.register
def _activation_refusal(problem: QuantizeActivation | QuantizeActivationBackward) -> str | None:
    why = _operands_refusal(problem)
    if why is None and isinstance(problem, QuantizeActivationBackward):
        dy = problem.dpostact
        if not _is_dense(dy, problem.preact.dtype):
            why = f"needs dense rows of one dtype, got {dy.dtype} with strides {list(dy.stride())}"
    return why or quantized_functions.refusal(problem)


def _operands_refusal(problem: QuantizeActivation | QuantizeActivationBackward) -> str | None:
    """The reason against the operands that both directions read, or None."""
    preact, spec, scales = problem.preact, problem.activation, problem.scales
    features = spec.out_features(preact.shape[1])
    backward = isinstance(problem, QuantizeActivationBackward)
    block, least = spec.block or features, BLOCK if backward else 8
    if preact.dtype not in (torch.bfloat16, torch.float16):
        return f"quantises bfloat16 or float16 rows, not {preact.dtype}"
    if not _is_dense(preact, preact.dtype):
        return f"needs dense rows, got strides {list(preact.stride())}"
    if spec.gated and block % least and block not in (1, 2, 4):
        return f"needs blocks of gate and up of 1, 2 or 4 columns, or multiples of {least}, got {block}"
    if scales is not None and not (scales.dtype in TYPE_CODES and scales.is_contiguous()):
        return f"needs dense scales of 16 or 32 bits, got {scales.dtype} with strides {list(scales.stride())}"
    return tokens_refusal(preact.shape[0], problem.split_sizes) or features_refusal(features)


def _is_dense(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous() and addresses(tensor)[0] % _VECTOR == 0


@run.register
def _quantize_activation(problem: QuantizeActivation) -> None:
    compiled().quantize_activation(**_activation_arguments(problem), **_copy_arguments(problem.rows, problem.columns))


@run.register
def _quantize_activation_backward(problem: QuantizeActivationBackward) -> None:
    postact_data, postact_scales, *_ = problem.postact_columns or (None, None)
    dvectors = quantized_functions.gradients(problem)
    of_columns = quantized_functions.gradient_fields(problem, dvectors)
    workspace = _workspace(problem, len(of_columns.get("dvectors", ())))
    compiled().quantize_activation_backward(
        **_activation_arguments(problem),
        dpostact=problem.dpostact.data_ptr(),
        **_copy_arguments(problem.rows, problem.columns),
        postact_columns=address(postact_data),
        postact_scales=address(postact_scales),
        dscales=address(problem.dscales),
        workspace=address(workspace),
        **of_columns,
    )
    if dvectors is not None:
        dvectors.finish()


def _activation_arguments(problem: QuantizeActivation | QuantizeActivationBackward) -> dict[str, Any]:
    preact, device = problem.preact, problem.preact.get_device()
    features = problem.activation.out_features(preact.shape[1])
    scales, scales_type = scale_arguments(problem.scales)
    return {
        **quantized_functions.fields(problem),
        "device": device,
        "stream": stream(device),
        "type": TYPE_CODES[preact.dtype],
        "tokens": preact.shape[0],
        "features": features,
        "preact": preact.data_ptr(),
        **group_arguments(problem.split_sizes),
        "power_of_two": problem.power_of_two,
        "scales": scales,
        "scales_type": scales_type,
    }


def _workspace(problem: QuantizeActivationBackward, dvectors: int) -> Tensor | None:
    """The workspace, or None if nothing is summed. Sized at every call, so a capture sees the sizes it depends on."""
    if problem.dscales is None and not dvectors:
        return None
    tokens, features = problem.dpostact.shape
    of_columns = {"groups": problem.split_sizes.shape[0], "dvectors": dvectors} if dvectors else {}
    size = compiled().quantize_backward_workspace(tokens=tokens, features=features, **of_columns)
    return problem.dpostact.new_empty(size, dtype=torch.uint8)
