"""Two user-defined fusions: one of a new op, and one across a residual connection.

Run it with ``python -m fusible.examples.custom_fusion``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusible import AddExtraInput, Bias, FusedOp, Grads, Linear, MakeExtraOutput, Op, Pattern, Sequential, TensorSpec
from fusible import register_fusion as fusion


class Softcap(Op):
    """``cap * tanh(x / cap)``: bounds logits."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def check(self, x: TensorSpec) -> TensorSpec:
        return x  # the output is like the input: later ops can be checked before anything runs

    def fwd(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.cap * torch.tanh(x / self.cap)
        return y, y

    def bwd(self, saved: Tensor, dy: Tensor) -> Grads:
        return {"x": lambda: dy * (1 - (saved / self.cap) ** 2)}


@fusion(Pattern.path(bias=Bias, cap=Softcap))
class BiasSoftcap(FusedOp):
    """Saves its output alone; one pass over the rows in the backward gives both gradients."""

    bias: Bias
    cap: Softcap

    def fwd(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.cap.cap * torch.tanh((x + self.bias.bias).to(x.dtype) / self.cap.cap)
        return y, y

    def bwd(self, saved: Tensor, dy: Tensor) -> Grads:
        dx = dy * (1 - (saved / self.cap.cap) ** 2)
        return {"x": dx, "bias.bias": lambda: dx.flatten(0, -2).sum(0)}


@fusion(
    Pattern.path(keep=MakeExtraOutput, linear=Linear, add=AddExtraInput)
    .edge("keep", "add", port="residual")
    .where("the linear has a bias", lambda m: m.linear.bias is None)
    .where("the linear is not square", lambda m: m.linear.in_features == m.linear.out_features)
)
class ResidualLinear(FusedOp):
    """``x + x W^T`` as one matrix product accumulated onto x, and its gradient as one accumulated onto dy."""

    linear: Linear

    class Saved(NamedTuple):
        x: Tensor
        weight: Tensor

    def fwd(self, x: Tensor, *, autocast_dtype: torch.dtype | None) -> tuple[Tensor, Saved]:
        dtype = autocast_dtype or x.dtype
        rows, weight = x.flatten(0, -2).to(dtype), self.linear.weight.to(dtype)
        return torch.addmm(rows, rows, weight.mT).view_as(x), self.Saved(rows, weight)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        rows, weight = saved
        drows = dy.reshape(rows.shape)
        return {
            "x": lambda: torch.addmm(drows, drows, weight).view_as(dy),
            "linear.weight": lambda: (drows.mT @ rows).to(self.linear.weight.dtype),
        }


def main() -> None:
    """Runs both fusions in one model; results are the same as without them."""
    torch.manual_seed(0)
    model = Sequential(
        MakeExtraOutput("residual"), Linear(8, 8, bias=False), AddExtraInput("residual"), Bias(8), Softcap(30.0)
    )
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    print(model.explain())
    print(model.explain().to_text())


if __name__ == "__main__":
    main()
