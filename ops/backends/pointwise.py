"""Activations, gated or not, times an optional row scale: forward and backward, in PyTorch, on any device.

Half-precision inputs are computed in float32 and rounded once, at the end. The columns of gate and up are views of one
tensor [rows, blocks, 2, block], in whichever layout they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..activations import ActivationSpec

_aten = torch.ops.aten
_QUICK = 1.702


class Curve(NamedTuple):
    """``value(x)``, and ``slope(grad, x)``: the gradient passed back through it."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


def _silu(alpha: float) -> Curve:
    """x * sigmoid(alpha x) = silu(alpha x) / alpha, whose slope is silu'(alpha x)."""
    if alpha == 1.0:
        return Curve(F.silu, _aten.silu_backward)
    return Curve(lambda x: F.silu(x * alpha) / alpha, lambda grad, x: _aten.silu_backward(grad, x * alpha))


def _gelu(approximate: str) -> Curve:
    return Curve(
        lambda x: F.gelu(x, approximate=approximate),
        lambda grad, x: _aten.gelu_backward(grad, x, approximate=approximate),
    )


_CURVES: dict[str, Curve] = {
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "quick_gelu": _silu(_QUICK),
    "relu": Curve(F.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
    "relu2": Curve(lambda x: F.relu(x).square(), lambda grad, x: grad * (2 * F.relu(x))),
    "sigmoid": Curve(torch.sigmoid, lambda grad, x: _aten.sigmoid_backward(grad, torch.sigmoid(x))),
}


def _curve(spec: ActivationSpec) -> Curve:
    return _silu(spec.alpha) if spec.name == "silu" else _CURVES[spec.name]


class ActivationGrads(NamedTuple):
    """Gradients of the pre-activation and of the scales; and the activation times the scales, computed again."""

    pre: Tensor
    scales: Tensor | None
    hidden: Tensor | None


def forward(pre: Tensor, spec: ActivationSpec, scales: Tensor | None) -> Tensor:
    """[rows, C] -> [rows, F], times ``scales`` [rows] before the one rounding."""
    gate, up = _inputs(pre, spec)
    hidden = _times(_curve(spec).value(gate), up)
    hidden = hidden.reshape(*pre.shape[:-1], spec.out_features(pre.shape[-1]))
    return _scaled(hidden, scales).to(pre.dtype)


def backward(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, scales: Tensor | None, want_scales: bool, want_hidden: bool
) -> ActivationGrads:
    """Gradients from ``dhidden`` [rows, F]: the activation is computed again from ``pre``."""
    curve, (gate, up) = _curve(spec), _inputs(pre, spec)
    value, grad = curve.value(gate), dhidden.to(gate.dtype)
    plain = _times(value, up).reshape(grad.shape) if want_scales or want_hidden else None
    dscales = (
        (grad * plain).sum(-1).to(scales.dtype) if want_scales and plain is not None and scales is not None else None
    )
    hidden = _scaled(plain, scales).to(pre.dtype) if want_hidden and plain is not None else None
    grad = _scaled(grad, scales).to(gate.dtype).view(gate.shape)
    if up is None:
        return ActivationGrads(curve.slope(grad, gate).to(pre.dtype), dscales, hidden)
    dpre = torch.empty_like(pre)
    dgate, dup = _halves(dpre, spec)
    dgate.copy_(curve.slope(grad * up, gate))
    torch.mul(grad, value, out=dup) if dup.dtype == grad.dtype else dup.copy_(grad * value)
    _mask_clamped(dgate, dup, pre, spec)
    return ActivationGrads(dpre, dscales, hidden)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _halves(pre: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up columns, [rows, blocks, block] each."""
    block = spec.block or pre.shape[-1] // 2
    both = pre.view(*pre.shape[:-1], pre.shape[-1] // max(1, 2 * block), 2, block)
    return both.select(-2, 0), both.select(-2, 1)


def _inputs(pre: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor | None]:
    """What the curve is applied to, and what its value is multiplied by, clamped and offset, in the wide dtype."""
    wide = _wide(pre.dtype)
    if not spec.gated:
        return pre.to(wide), None
    gate, up = (half.to(wide) for half in _halves(pre, spec))
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate, up + spec.linear_offset if spec.linear_offset else up


def _mask_clamped(dgate: Tensor, dup: Tensor, pre: Tensor, spec: ActivationSpec) -> None:
    """What was clamped has gradient zero."""
    if spec.limit is not None:
        gate, up = _halves(pre, spec)
        dgate.masked_fill_(gate > spec.limit, 0)
        dup.masked_fill_(up.abs() > spec.limit, 0)


def _times(value: Tensor, up: Tensor | None) -> Tensor:
    return value if up is None else value * up


def _scaled(rows: Tensor, scales: Tensor | None) -> Tensor:
    return rows if scales is None else rows * scales.unsqueeze(-1)
