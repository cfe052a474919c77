"""The bits that tensor cores keep of an accumulator and a few products of e4m3."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusible.ops.formats.copies import QuantizedRows
from fusible.ops.kernels.hopper import scaled_gemm as hopper
from fusible.ops.kernels.problems.quantized import ScaledGemm

STEP = 32
"""Products that the tensor cores add at once."""


def accumulated(device: str, first: Sequence[tuple[float, float]], then: Sequence[tuple[float, float]]) -> float:
    """The sum of the products of pairs: of those of ``first``, to which those of ``then`` are added at once."""
    a, b = torch.zeros(2, 2 * STEP, device=device).unbind()
    for start, pairs in ((0, first), (STEP, then)):
        for i, (x, y) in enumerate(pairs, start):
            a[i], b[i] = x, y
    out = torch.empty(1, 8, device=device)
    problem = ScaledGemm(
        a=QuantizedRows(a.to(torch.float8_e4m3fn)[None], torch.ones(1, 4, device=device)),
        weight=b.to(torch.float8_e4m3fn).expand(1, 8, -1).contiguous(),
        weight_scales=torch.ones(1, 1, 1, device=device),
        halves=1,
        split_sizes=torch.ones(1, dtype=torch.int32, device=device),
        out=out,
    )
    hopper.launch_gemm(problem)
    return float(out[0, 0])
