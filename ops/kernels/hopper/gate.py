"""The products of a router's gate by our own grouped GEMM, with one group, summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.switches import active_switches
from ..problems.gate import MANY_TOKENS, GateProduct
from ..problems.gemm import GroupedGemm, Layout
from . import gemm


def refusal(p: GateProduct) -> str | None:
    """Why the kernels do not take the product; None: they do."""
    if p.a.shape[0] < MANY_TOKENS and active_switches().backend != gemm.NAME:
        return f"begins at {MANY_TOKENS} tokens: for fewer it costs the host more time than it saves on the GPU"
    if p.b.dtype != torch.bfloat16 or p.a.dtype not in (torch.bfloat16, torch.float32):
        return f"needs tokens and a weight of bfloat16, got {p.a.dtype} and {p.b.dtype}"
    if p.a.dtype == torch.float32 and p.layout is Layout.NT:
        return "needs tokens of bfloat16, got torch.float32"
    a = p.a if p.a.dtype == p.b.dtype else p.b.new_empty(1, p.a.shape[1])  # as the split ones are
    out = p.a.new_empty(1, p.shape[1], dtype=torch.float32)
    return gemm.refusal(_product(p, a, out, p.a.new_empty(1, dtype=torch.int32)))


def run(p: GateProduct) -> None:
    """Fills ``out``. A float32 gradient is the sum of two bfloat16 numbers, within 2^-16 of it: a product of each."""
    assert p.out is not None
    sizes = torch.full((1,), p.a.shape[0], dtype=torch.int32, device=p.a.device)
    for number, a in enumerate((p.a,) if p.a.dtype == p.b.dtype else split_in_two(p.a)):
        product = _product(p, a, p.out, sizes)
        product.beta, product.fresh = (1.0, False) if number else (None, True)
        gemm.launch(product)


def split_in_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 numbers whose sum is ``x`` within 2^-16; the second is zero if the first is not finite."""
    high = x.bfloat16()
    return high, torch.where(high.isfinite(), x - high.float(), 0).bfloat16()


def _product(p: GateProduct, a: Tensor, out: Tensor, sizes: Tensor) -> GroupedGemm:
    bias = None if p.bias is None else p.bias.float().unsqueeze(0)
    b, out = (p.b, out.unsqueeze(0)) if p.layout is Layout.TN else (p.b.unsqueeze(0), out)
    return GroupedGemm(p.layout, a, b, sizes, out, bias=bias)
