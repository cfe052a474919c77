"""The problems that PyTorch solves: products under the names ``"grouped_mm"`` and ``"loop"``, others under any name."""

from __future__ import annotations

import torch

from ..problems import kinds
from ..problems.function import function_by
from ..problems.gemm import GroupedGemm
from ..problems.interface import GemmImplementation, Implementation, Implementations, solving
from ..problems.rows import RowPass
from ..problems.transposition import ByteTransposition
from . import (
    activation,
    decode,
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


def _transpose(p: ByteTransposition) -> None:
    p.out.view(torch.uint8).copy_(p.data.view(torch.uint8).mT)


GROUPED_MM = GemmImplementation(grouped_mm.NAME, grouped_mm.NAME, grouped_mm.run, grouped_mm.refusal, device="cuda")
_ON_CPU = GemmImplementation(
    *(grouped_mm_cpu.NAME, grouped_mm_cpu.NAME, grouped_mm_cpu.run, grouped_mm_cpu.refusal),
    device="cpu",
    has_epilogues=True,
    zeroes_tail=True,
)
LOOP = GemmImplementation(loop.NAME, loop.NAME, loop.run, loop.refusal, warn=_warn_of_float32, has_epilogues=True)
ROWS_OF_GROUPED_MM: Implementation[RowPass] = Implementation(None, grouped_mm.NAME, solving(grouped_mm), device="cuda")
_SCALED = f"{scaled_gemm.NAME} (e4m3)"

KERNELS: Implementations = (
    *((kinds.GEMM, GROUPED_MM), (kinds.GEMM, _ON_CPU), (kinds.GEMM, LOOP)),
    (kinds.RAGGED, Implementation(loop.NAME, loop.NAME, ragged_loop.run, ragged_loop.refusal)),
    (kinds.ACTIVATION, Implementation(None, activation.NAME, solving(activation))),
    (kinds.FUNCTION, Implementation(None, pointwise.NAME, function_by(pointwise))),
    (kinds.POINTWISE, Implementation(None, pointwise.NAME, solving(pointwise))),
    (kinds.ROW_PASS, ROWS_OF_GROUPED_MM),  # which keep split sizes on the device
    (kinds.ROW_PASS, Implementation(None, loop.NAME, solving(loop))),
    (kinds.TRANSPOSITION, Implementation(None, "torch (transpose)", _transpose)),
    (kinds.DECODING, Implementation(None, lambda p: f"torch (decode {p.name})", decode.run)),
    (kinds.QUANTIZER, Implementation(None, f"{quantize.NAME} (quantise)", quantize.run)),
    (kinds.FAKE_QUANTIZER, Implementation(None, f"{fake_quantize.NAME} (quantise)", fake_quantize.run)),
    (kinds.SCALED_PRODUCT, Implementation(loop.NAME, _SCALED, scaled_gemm.run, scaled_gemm.refusal, by_name=True)),
    (kinds.SCALED_PRODUCT, Implementation(None, _SCALED, scaled_gemm.run)),  # the door multiplies in 16 bits on a GPU
)
