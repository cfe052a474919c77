"""Our own CUDA kernels that quantise and dequantise in one pass, in registers.

They write memory that the door has just allocated and no one else has seen, so its version stays, and its form needs no
check. Rows past the last group are neither read nor written.
"""

from __future__ import annotations

from torch import Tensor

from ...formats.copies import PackedFormat
from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream
from ..problems.fake_quantized import FakeQuantizeRows, FakeQuantizeWeight, FakeQuantizing
from ..problems.gemm import addresses, first
from .quantize import (
    features_refusal,
    group_arguments,
    indices_refusal,
    matrices_refusal,
    rows_refusal,
    tokens_refusal,
)

_FORMAT_CODES = {PackedFormat.MXFP8: 0, PackedFormat.NVFP4: 1}


def refusal(problem: FakeQuantizing) -> str | None:
    """Why the kernels do not take this; None: they do."""
    if (why := hardware_refusal(problem.tensor)) is not None:
        return why
    if problem.format not in _FORMAT_CODES:
        return f"rounds to {' or '.join(f.value for f in _FORMAT_CODES)}, not {problem.format.value}"
    return _rows_refusal(problem) if isinstance(problem, FakeQuantizeRows) else _weight_refusal(problem)


def run(problem: FakeQuantizing) -> None:
    """Fills the tensors of a problem that was not refused."""
    if isinstance(problem, FakeQuantizeRows):
        _run_rows(problem)
    else:
        _run_weight(problem)


def _rows_refusal(problem: FakeQuantizeRows) -> str | None:
    x = problem.x
    why = rows_refusal(x) or tokens_refusal(problem.tokens, problem.split_sizes)
    return why or features_refusal(x.shape[1]) or indices_refusal(problem.slot_of_row)


def _weight_refusal(problem: FakeQuantizeWeight) -> str | None:
    weight, one = problem.weight, first(problem.weight)
    matrices, distance = ([weight], one.stride(0)) if isinstance(weight, Tensor) else (list(weight), 0)
    return matrices_refusal(matrices, distance) or features_refusal(one.shape[-1])


def _run_rows(problem: FakeQuantizeRows) -> None:
    x, device = problem.x, problem.x.get_device()
    compiled().fake_quantize_rows(
        device=device,
        stream=stream(device),
        format=_FORMAT_CODES[problem.format],
        type=TYPE_CODES[x.dtype],
        tokens=problem.tokens,
        features=x.shape[1],
        x=x.data_ptr(),
        pitch=x.stride(0),
        **group_arguments(problem.split_sizes),
        rows=address(problem.rows),
        columns=address(problem.columns),
        slot_of_row=address(problem.slot_of_row),
        top_k=problem.top_k,
        is_transformed=problem.is_transformed,
        row_amax=address(problem.row_amax),
        column_amax=address(problem.column_amax),
        seed=address(problem.seed),
    )


def _run_weight(problem: FakeQuantizeWeight) -> None:
    weight, one = problem.weight, first(problem.weight)
    is_stacked, device = isinstance(weight, Tensor), one.get_device()
    n, k = one.shape[-2:]
    compiled().fake_quantize_weight(
        device=device,
        stream=stream(device),
        format=_FORMAT_CODES[problem.format],
        type=TYPE_CODES[one.dtype],
        groups=len(weight),
        n=n,
        k=k,
        weight=one.data_ptr() if is_stacked else 0,
        pitch=one.stride(-2),
        group_stride=one.stride(0) if is_stacked else 0,
        addresses=[] if is_stacked else list(addresses(weight)),
        rows=address(problem.rows),
        columns=address(problem.columns),
        amax=address(problem.amax),
    )
