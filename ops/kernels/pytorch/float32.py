"""Float32 products on a GPU by the loop over groups, which cuBLAS computes one by one: a warning, and TF32."""

from __future__ import annotations

import warnings
from functools import cache

import torch


@cache
def warn_once() -> None:
    """Warns once in a process about the cost of float32, and names the fix."""
    cure = (
        "" if allows_tf32() else "; or let a GPU round float32 operands: torch.backends.cuda.matmul.allow_tf32 = True"
    )
    warnings.warn(
        "fusible: products of float32 run one expert after the other on a GPU, and wait for the split sizes. On an "
        "H100 a step of experts is 14 to 23 x faster in bfloat16. Make the experts bfloat16, or call them under "
        f"torch.autocast('cuda', torch.bfloat16){cure}. config(strict=True) makes this an error, "
        "config(backend='loop') silences it",
        stacklevel=2,
    )


def allows_tf32() -> bool:
    """Whether products may round float32 operands to TF32, by torch's newer switch or its older one.

    Torch raises if a program reads the older switch after setting the newer.
    """
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
