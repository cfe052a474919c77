"""The product of a router, in float32 for all dtypes of tokens and weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...fuser import Grads, Op, Promises, TensorSpec
from ..kernels.doors.gate import gate_product
from ..kernels.problems.gemm import Layout


class Gate(Op):
    """Logits [T, E] of tokens [T, H]: few but important numbers, so they are computed in float32.

    Arxiv 2101.03961, section 2.4. For the backward it keeps the tokens as they are, which the experts keep anyway, and
    no copy of them in float32.

    Keyword Args:
        weight: [E, H].
        logit_bias: [E], added to the logits.
    """

    promises = Promises(values_checked=frozenset())

    class Saved(NamedTuple):
        x: Tensor | None
        weight: Tensor
        dtype: torch.dtype
        bias_dtype: torch.dtype | None

    def check(self, x: TensorSpec, *, weight: Tensor, logit_bias: Tensor | None = None) -> TensorSpec:
        return TensorSpec((x.shape[0], weight.shape[0]), _wide(x.dtype), x.device)

    def fwd(
        self, x: Tensor, *, weight: Tensor, logit_bias: Tensor | None = None, needs_grad: frozenset[str]
    ) -> tuple[Tensor, Saved]:
        kept = x if "weight" in needs_grad else None
        saved = self.Saved(kept, weight, x.dtype, None if logit_bias is None else logit_bias.dtype)
        return gate_product(Layout.NT, x, weight, logit_bias), saved

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        x, weight, dtype, bias_dtype = saved
        grads: dict[str, object] = {"x": lambda: gate_product(Layout.NN, dy, weight).to(dtype)}
        if x is not None:
            grads["weight"] = lambda: gate_product(Layout.TN, dy, x).to(weight.dtype)
        if bias_dtype is not None:
            grads["logit_bias"] = lambda: dy.sum(0).to(bias_dtype)
        return grads  # type: ignore[return-value]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
