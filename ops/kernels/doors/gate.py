"""The door to the products of a router's gate: our own kernels where they are asked for, or PyTorch's in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....fuser.contract import tracing as trace
from ...values.switches import active_switches
from .. import dispatch
from ..problems.gate import MANY_TOKENS, GateProduct
from ..problems.gemm import Layout


def gate_product(layout: Layout, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of a :class:`GateProduct`, in float32; in float64 if ``a`` is."""
    wide = torch.promote_types(a.dtype, torch.float32)
    problem = GateProduct(layout, a, b, bias)
    is_recorded = trace.current_trace() is not None
    if a.shape[0] and (is_recorded or not isinstance(a, trace.WITHOUT_DATA)):
        choice = dispatch.choose(problem, is_recorded)
        if not choice.is_fallback:
            problem.out = a.new_empty(problem.shape, dtype=wide)
            dispatch.solve(problem, choice)
            return problem.out
    return product_by_torch(layout, a, b, bias, wide)


def is_left_to_torch(tokens: int) -> bool:
    """Whether no kernel of ours takes so few tokens."""
    return tokens < MANY_TOKENS and active_switches().backend == "auto"


def product_by_torch(layout: Layout, a: Tensor, b: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """The product in the dtype ``wide``."""
    a, b = a.to(wide), b.to(wide)
    if layout is Layout.NT:
        return F.linear(a, b, None if bias is None else bias.to(wide))
    return a @ b if layout is Layout.NN else a.T @ b
