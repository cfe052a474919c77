"""``grouped_gemm`` of plain tensors in code that is being compiled. Importing this imports the compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import functional


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def call(a: Tensor, b: Tensor, split_sizes: Any, offsets: Any, layout: str, out: Any, *how: Any) -> Any:
    """What Dynamo puts into its graph: AOTAutograd traces through it, down to the kernel door."""
    accumulate, alpha, beta, bias, out_elements = how
    return functional.grouped_gemm(
        *(a, b, split_sizes),
        offsets=offsets,
        layout=layout,
        out=out,
        accumulate=accumulate,
        alpha=alpha,
        beta=beta,
        bias=bias,
        out_elements=out_elements,
    )
