"""What PyTorch solves: products under names of their own, ``"grouped_mm"`` and ``"loop"``; all else under any name."""

from __future__ import annotations

from typing import Any

import torch

from ..problems import kinds
from ..problems.function import function_by
from ..problems.gemm import GroupedGemm
from ..problems.interface import GemmKernels, Kernels, Kind
from ..problems.rows import ActivateRows, Activating, PointwiseBackward, PointwiseForward
from ..problems.transposition import Transposition
from . import (
    activation,
    fake_quantize,
    float32,
    grouped_mm,
    grouped_mm_cpu,
    loop,
    pointwise,
    quantize,
    ragged_loop,
    scaled_gemm,
)


def _warn_of_float32(problem: GroupedGemm) -> None:
    if problem.a.dtype == torch.float32 and problem.a.is_cuda:
        float32.warn_once()


def _activate(p: Activating) -> None:
    if isinstance(p, ActivateRows):
        activation.forward(p.preact, p.spec, p.scales, p.out)
    else:
        activation.backward(p.dpostact, p.preact, p.spec, p.scales, p.out)


def _pointwise(p: PointwiseForward | PointwiseBackward) -> None:
    if isinstance(p, PointwiseForward):
        pointwise.forward(p.program, p.rows, p.out)
    else:
        pointwise.backward(p.program, p.rows, p.columns, p.out)


def _transpose(p: Transposition) -> None:
    p.out.view(torch.uint8).copy_(p.data.view(torch.uint8).mT)


def _row_kernels(module: Any, device: str | None) -> tuple[tuple[Kind[Any], Kernels[Any]], ...]:
    """The passes over rows that know groups, of a module that has all of them."""
    sums, dots, tail = (
        lambda p: module.column_sums(p.rows, p.split_sizes, p.out, p.scale),
        lambda p: module.row_dots(p.rows, p.vectors, p.split_sizes, p.out),
        lambda p: module.zero_tail(p.rows, p.split_sizes),
    )
    of_kinds = ((kinds.COLUMN_SUMS, sums), (kinds.ROW_DOTS, dots), (kinds.ZERO_TAIL, tail))
    return tuple([(kind, Kernels(None, module.NAME, run, device=device)) for kind, run in of_kinds])


_GROUPED_MM = GemmKernels(grouped_mm.NAME, grouped_mm.NAME, grouped_mm.run, grouped_mm.refusal, "cuda")
_ON_CPU = GemmKernels(
    *(grouped_mm_cpu.NAME, grouped_mm_cpu.NAME, grouped_mm_cpu.run, grouped_mm_cpu.refusal, "cpu"),
    has_epilogues=True,
    zeroes_tail=True,
)
_LOOP = GemmKernels(
    *(loop.NAME, loop.NAME, loop.run, loop.refusal),
    warn=_warn_of_float32,
    has_epilogues=True,
)

KERNELS: tuple[tuple[Kind[Any], Kernels[Any]], ...] = (
    *((kinds.GEMM, _GROUPED_MM), (kinds.GEMM, _ON_CPU), (kinds.GEMM, _LOOP)),
    (kinds.RAGGED, Kernels(loop.NAME, loop.NAME, ragged_loop.run, ragged_loop.refusal)),
    (kinds.ACTIVATION, Kernels(None, activation.NAME, _activate)),
    (kinds.FUNCTION, Kernels(None, pointwise.NAME, function_by(pointwise))),
    (kinds.POINTWISE, Kernels(None, pointwise.NAME, _pointwise)),
    *_row_kernels(grouped_mm, "cuda"),  # which keeps split sizes on the device
    *_row_kernels(loop, None),
    (kinds.TRANSPOSITION, Kernels(None, "torch (transpose)", _transpose)),
    (kinds.QUANTIZER, Kernels(None, f"{quantize.NAME} (quantise)", quantize.run)),
    (kinds.FAKE_QUANTIZER, Kernels(None, f"{fake_quantize.NAME} (quantise)", fake_quantize.run)),
    (kinds.SCALED_PRODUCT, Kernels(None, f"{scaled_gemm.NAME} (e4m3)", scaled_gemm.run)),
)
