"""Routed layers for checks: sizes, tensors, and what they give in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusible.ops.kernels.doors.inference import Experts
from fusible.ops.kernels.pytorch import activation as pointwise
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

GPT_OSS = gated("silu", 7.0, 1.702, 1.0, interleaved(1))
SPECS = {"silu glu": gated("silu", None, 1.0, 0.0, "concat"), "gpt-oss": GPT_OSS, "relu2": ActivationSpec("relu2")}


@dataclass(frozen=True)
class Case:
    """A layer and its tokens."""

    name: str = "silu glu"
    transposed: bool = False
    biases: bool = False
    tokens: int = 37
    slots: int = 3
    groups: int = 5
    features: int = 136
    columns: int = 72
    dtype: torch.dtype = torch.bfloat16
    absent: bool = False
    weights: torch.dtype = torch.float32

    @property
    def spec(self) -> ActivationSpec:
        return SPECS[self.name]


CASES = {
    "plain": Case(),
    "gpt-oss": Case("gpt-oss", transposed=True, biases=True),
    "biases": Case(biases=True, slots=4),
    "not gated": Case("relu2", dtype=torch.float16, slots=1),
    "absent": Case("gpt-oss", biases=True, absent=True),
    "absent, transposed": Case(transposed=True, absent=True, slots=8),
    "one token": Case(tokens=1, slots=5),
    "nothing": Case(tokens=0, slots=2),
}


def drawn(device: str, *shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype).requires_grad_()


class Problem:
    """Tensors for a case. Tokens of no expert are NaN: they reach nothing."""

    def __init__(self, device: str, c: Case) -> None:
        e, k, f, d = c.groups, c.features, c.columns, c.dtype
        n = 2 * f if c.spec.gated else f
        up, down = ((k, n), (f, k)) if c.transposed else ((n, k), (k, f))
        self.case = c
        self.parameters = [
            drawn(device, e, *up, dtype=d, seed=1, scale=k**-0.5),
            drawn(device, e, *down, dtype=d, seed=2, scale=f**-0.5),
            drawn(device, e, n, dtype=d, seed=3) if c.biases else None,
            drawn(device, e, k, dtype=d, seed=4) if c.biases else None,
        ]
        self.x, self.dy = (
            drawn(device, c.tokens, k, dtype=d, seed=5),
            drawn(device, c.tokens, k, dtype=d, seed=6).detach(),
        )
        ids = torch.rand(c.tokens, e, generator=torch.Generator(device).manual_seed(7), device=device).argsort(-1)
        ids = ids.repeat(1, 1 + c.slots // e)[:, : c.slots]
        self.weights = drawn(device, c.tokens, c.slots, dtype=c.weights, seed=8)
        self.lost = torch.zeros(c.tokens, 1, dtype=torch.bool, device=device)
        if c.absent:
            ids = torch.where(ids % 2 == 1, ids, e)
            self.lost = (ids == e).all(1, keepdim=True)
        self.ids = ids.contiguous()
        with torch.no_grad():
            self.x.masked_fill_(self.lost, torch.nan)

    @property
    def experts(self) -> Experts:
        return Experts(*self.parameters, self.case.spec, self.case.transposed)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, *(p for p in self.parameters if p is not None)]

    def truth(self) -> list[Tensor]:
        """The same in float64, slot by slot."""
        leaves = [t.detach().double().requires_grad_() for t in self.leaves]
        x, weights, up, down, *biases = leaves
        up_bias, down_bias = biases or (None, None)
        up, down = (up, down) if self.case.transposed else (up.mT, down.mT)
        y = torch.zeros_like(x)
        for slot in range(self.case.slots):
            ids = self.ids[:, slot]
            here = ids < self.case.groups
            at = ids.where(here, 0)
            pre = torch.bmm(x.masked_fill(self.lost, 0).unsqueeze(1), up[at]).squeeze(1)
            pre = pre if up_bias is None else pre + up_bias[at]
            out = torch.bmm(activated(pre, self.case.spec).unsqueeze(1), down[at]).squeeze(1)
            out = out if down_bias is None else out + down_bias[at]
            y = y + (out * weights[:, slot : slot + 1]).masked_fill(~here[:, None], 0)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy.double())]


def activated(pre: Tensor, spec: ActivationSpec) -> Tensor:
    class Exact(torch.autograd.Function):
        @staticmethod
        def forward(ctx, pre):
            ctx.save_for_backward(pre)
            out = pre.new_empty(pre.shape[0], spec.out_features(pre.shape[1]))
            pointwise.forward(pre, spec, None, out)
            return out

        @staticmethod
        def backward(ctx, dout):
            (pre,) = ctx.saved_tensors
            grads = pointwise.ActivationGrads(torch.empty_like(pre), None, None)
            pointwise.backward(dout, pre, spec, None, grads)
            return grads.preact

    return Exact.apply(pre)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-9))
