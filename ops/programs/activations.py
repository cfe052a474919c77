"""The built-in activations as functions, and the programs traced from them.

A function takes x, or gate and up, then the slope inside silu, the limit and the offset of up. Functions written as a
:class:`torch.autograd.Function` have a gradient with fewer operations than autograd's, or a different one at NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .compose import scaled
from .program import Program
from .tracing import trace

Number = Tensor | float


class _Silu(torch.autograd.Function):
    """``x * sigmoid(alpha * x)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Number) -> Tensor:
        sigmoid = torch.sigmoid(x * alpha)
        ctx.value, ctx.sigmoid, ctx.alpha = x * sigmoid, sigmoid, alpha
        return ctx.value  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * (ctx.sigmoid + ctx.value * ctx.alpha * (1.0 - ctx.sigmoid)), None


class _Relu2(torch.autograd.Function):
    """``relu(x)**2``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.relu = F.relu(x)
        return ctx.relu.square()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * (ctx.relu * 2.0)


class _Clamped(torch.autograd.Function):
    """Clamps x to at most the limit; if ``both``, to at least minus the limit too.

    Clamped elements have gradient zero, NaN passes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: Number, both: bool) -> Tensor:
        ctx.is_over = (x.abs() if both else x) > limit
        return x.clamp(-limit if both else None, limit)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return torch.where(ctx.is_over, 0.0, dy), None, None


CURVES: dict[str, Callable[[Tensor, Number], Tensor]] = {
    "silu": lambda x, alpha: _Silu.apply(x, alpha),  # type: ignore[no-untyped-call]
    "gelu": lambda x, _: F.gelu(x),
    "gelu_tanh": lambda x, _: F.gelu(x, approximate="tanh"),
    "relu": lambda x, _: F.relu(x),
    "relu2": lambda x, _: _Relu2.apply(x),  # type: ignore[no-untyped-call]
    "sigmoid": lambda x, _: torch.sigmoid(x),
}
"""By name, in the order of ``Curve`` in csrc."""
_SLOPES = {"quick_gelu": ("silu", 1.702)}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid")


class Curve(NamedTuple):
    """The function behind an activation's name: one of :data:`CURVES`, and the slope inside silu."""

    name: str
    alpha: float

    @classmethod
    def of(cls, name: str, alpha: float) -> Curve:
        """The curve of one of :data:`ACTIVATIONS`. Only silu uses ``alpha``."""
        return cls(*_SLOPES.get(name, (name, alpha)))


@lru_cache(maxsize=1024)
def program_of(curve: Curve, is_gated: bool, limit: float | None, linear_offset: float) -> Program:
    """The program of an activation with these parameters, times the scale of the row."""

    def value(gate: Tensor, *up: Tensor) -> Tensor:
        return value_of(curve.name, gate, *up, alpha=curve.alpha, limit=limit, linear_offset=linear_offset)

    return scaled(trace(value, ("x", "u") if is_gated else ("x",)))


def value_of(
    curve: str, gate: Tensor, up: Tensor | None = None, *, alpha: Number, limit: Number | None, linear_offset: Number
) -> Tensor:
    """The activation of x, or of gate and up; ``alpha`` is the slope inside silu."""
    if up is None:
        return CURVES[curve](gate, alpha)
    if limit is not None:
        gate, up = _Clamped.apply(gate, limit, False), _Clamped.apply(up, limit, True)  # type: ignore[no-untyped-call]
    return CURVES[curve](gate, alpha) * (up + linear_offset)
