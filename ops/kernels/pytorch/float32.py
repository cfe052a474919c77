"""Notes on float32 products on a GPU, which have no grouped kernel and are computed one by one by a library."""

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
        "H100 a step of experts takes 14 to 23 times as long as in bfloat16. Make the experts bfloat16, or call them "
        f"under torch.autocast('cuda', torch.bfloat16){cure}. config(strict=True) makes it an error, "
        "config(backend='loop') says that it is meant",
        stacklevel=2,
    )


def allows_tf32() -> bool:
    """Whether the library that multiplies may round operands of float32, under the newer switch of torch or the older.

    Torch raises if a program reads the older after setting the newer.
    """
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
