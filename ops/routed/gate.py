"""The product of a router, in float32 for all dtypes of tokens and weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...fuser import Grads, Op, Promises, TensorSpec
from ...fuser.contract.overrides import is_hooked
from ...fuser.contract.torch_private import apply_of
from ...fuser.replay.calls import observer
from ...fuser.runtime.autograd import autocasts
from ..kernels.doors.gate import gate_product, is_left_to_torch, product_by_torch
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


class _FewTokens(torch.autograd.Function):
    """The same products of few tokens by PyTorch. The node of an op costs the host more than they do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return product_by_torch(Layout.NT, x, weight, bias, _wide(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if autocasts(dy.device.type):
            with torch.autocast(dy.device.type, enabled=False):
                return _gradients(ctx, dy)
        return _gradients(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of :class:`_FewTokens`."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    wide = dy.dtype
    dx = product_by_torch(Layout.NN, dy, weight, None, wide).to(ctx.dtype) if needs_x else None
    d_weight = product_by_torch(Layout.TN, dy, x, None, wide).to(weight.dtype) if needs_weight else None
    return dx, d_weight, dy.sum(0).to(ctx.bias_dtype) if needs_bias else None


_by_torch: Callable[..., Any] = apply_of(_FewTokens)


def logits_of(gate: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits that a router's gate gives; of few tokens, without the work of a call of an op."""
    may_skip = type(gate) is Gate and not torch.compiler.is_dynamo_compiling() and _are_dense(x, weight, bias)
    # the size comes last, since an export makes a condition of what is asked of it
    if may_skip and not _is_watched(gate, x) and is_left_to_torch(x.shape[0]):
        logits: Tensor = _by_torch(x, weight, bias)
    else:
        logits = gate(x, weight=weight, logit_bias=bias)
    return logits


def _are_dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are tensors of torch's own classes on one device; the checks of a call name what is not."""
    fits = type(x) is Tensor and x.layout is torch.strided and type(weight) in (nn.Parameter, Tensor)
    return fits and x.device == weight.device and (bias is None or x.device == bias.device)


def _is_watched(gate: nn.Module, x: Tensor) -> bool:
    """Whether something else wants the call of the op than its result."""
    return is_hooked(gate) or autocasts(x.device.type) or observer() is not None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
