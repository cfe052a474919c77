"""``grouped_gemm`` in code that is being compiled. Importing this imports the compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import functional


def traced(a: Any, b: Any, *how: Any) -> Any:
    """What Dynamo traces: of plain tensors a part of the graph. Other groups end the graph."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _in_graph(a, b, *how)
    torch._dynamo.graph_break(msg="grouped_gemm: a GroupedTensor cannot be part of a graph")
    return _eagerly(a, b, *how)


def _call(a: Any, b: Any, split_sizes: Any, offsets: Any, layout: str, out: Any, *how: Any) -> Any:
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


_in_graph: Any = torch.compiler.allow_in_graph(_call)  # type: ignore[no-untyped-call]
_eagerly: Any = torch.compiler.disable(lambda *given: _call(*given))  # type: ignore[no-untyped-call]
