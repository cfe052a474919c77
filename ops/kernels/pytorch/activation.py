"""Activations, gated or not, times an optional row scale: forward and backward, in PyTorch, on any device.

Half-precision inputs are computed in float32 and rounded once, at the end. The columns of gate and up are views of one
tensor [rows, blocks, 2, block], in whichever layout they are stored.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from math import inf, nextafter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...values.activation_spec import ActivationSpec
from ..problems.function import FunctionKernels
from ..problems.gemm import ActivationGrads, FunctionOperands
from . import pointwise

_aten = torch.ops.aten
NAME = "torch"


class CurveFunctions(NamedTuple):
    """``value(x)``, a new tensor; and ``slope(grad, x, out)``: the gradient passed back through it, into ``out``.

    Where there is an ``alpha``, both are given ``alpha x`` in place of x.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor], Tensor]
    alpha: float | None = None


def _silu(alpha: float) -> CurveFunctions:
    """x * sigmoid(alpha x) = silu(alpha x) / alpha, whose slope is silu'(alpha x)."""
    backward = _aten.silu_backward.grad_input
    if alpha == 1.0:
        return CurveFunctions(F.silu, lambda grad, x, out: backward(grad, x, grad_input=out))
    return CurveFunctions(
        lambda x: F.silu(x).div_(alpha), lambda grad, x, out: backward(grad, x, grad_input=out), alpha
    )


def _gelu(approximate: str) -> CurveFunctions:
    backward = _aten.gelu_backward.grad_input
    return CurveFunctions(
        lambda x: F.gelu(x, approximate=approximate),
        lambda grad, x, out: backward(grad, x, approximate=approximate, grad_input=out),
    )


def _relu_slope(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    backward: Callable[..., Tensor] = _aten.threshold_backward.grad_input
    return backward(grad, x, 0, grad_input=out)


def _relu2_slope(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return torch.mul(grad, F.relu(x).mul_(2), out=out)


def _sigmoid_slope(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    backward: Callable[..., Tensor] = _aten.sigmoid_backward.grad_input
    return backward(grad, torch.sigmoid(x), grad_input=out)


_CURVES: dict[str, CurveFunctions] = {
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": CurveFunctions(F.relu, _relu_slope),
    "relu2": CurveFunctions(lambda x: F.relu(x).square_(), _relu2_slope),
    "sigmoid": CurveFunctions(torch.sigmoid, _sigmoid_slope),
}


@cache
def _curve(spec: ActivationSpec) -> CurveFunctions:
    name, alpha = spec.curve
    return _silu(alpha) if name == "silu" else _CURVES[name]


def forward(
    preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: Tensor, of_groups: FunctionOperands | None = None
) -> None:
    """``out`` [rows, F] = activation of ``preact`` [rows, C], times ``scales`` [rows] before the one rounding.

    Args:
        of_groups: the numbers of columns and elements that a user's function reads.
    """
    if spec.program is not None:
        return FunctionKernels(pointwise, spec.program, of_groups).forward(preact, spec, scales, out)
    _multiply_into(out, _wide_postact(preact, spec), None if scales is None else scales.unsqueeze(-1))


def _wide_postact(preact: Tensor, spec: ActivationSpec) -> Tensor:
    curve, (gate, up) = _curve(spec), _inputs(*_wide_columns(preact, spec), spec)
    value = curve.value(gate if curve.alpha is None else gate * curve.alpha)
    postact = value if up is None else value.mul_(up)
    return postact if postact.dim() == preact.dim() else postact.flatten(-2)


def backward(
    dpostact: Tensor,
    preact: Tensor,
    spec: ActivationSpec,
    scales: Tensor | None,
    out: ActivationGrads,
    of_groups: FunctionOperands | None = None,
) -> None:
    """Computes the tensors in ``out`` from ``dpostact`` [rows, F]; the activation is recomputed from ``preact``.

    With v the curve's value: ``postact = v up s``, ``dgate = slope(d up s)``, ``dup = d v s``, ``ds = sum(d v up)``.
    Products are made in place where they can be: on a CPU fresh memory costs more than the arithmetic.
    """
    if spec.program is not None:
        return FunctionKernels(pointwise, spec.program, of_groups).backward(dpostact, preact, spec, scales, out)
    curve, columns = _curve(spec), _wide_columns(preact, spec)
    gate, up = _inputs(*columns, spec)
    if curve.alpha is not None:
        gate = gate * curve.alpha
    value, grad = curve.value(gate), dpostact.to(gate.dtype).view(gate.shape)
    column = None if scales is None else _column(scales, gate)
    factor = _product(up, column)
    is_temporary = up is not None and column is not None
    if out.postact is not None:
        _multiply_into(out.postact.view(gate.shape), value, factor)
    dgate, dup = _gate_and_up(out.preact, spec) if spec.gated else (out.preact, None)
    dvalue = grad if factor is None else factor.mul_(grad) if is_temporary else (grad * factor).to(gate.dtype)
    if spec.limit is not None:
        dvalue.masked_fill_(columns[0] >= _next_above(spec.limit, dvalue.dtype), 0)
    _slope(curve, dvalue, gate, dgate)
    value.mul_(grad)
    if dup is not None:
        _multiply_into(dup, _of_unclamped(value, columns[1], spec.limit), column)
    if out.scales is not None:
        torch.sum(_times(value, up).view(dpostact.shape), -1, out=out.scales)


def _slope(curve: CurveFunctions, grad: Tensor, gate: Tensor, dgate: Tensor) -> None:
    """The gradient of the gate, in whatever dtype it is stored."""
    if gate.dtype == dgate.dtype:
        curve.slope(grad, gate, dgate)
    else:
        dgate.copy_(curve.slope(grad, gate, torch.empty_like(gate)))


def _multiply_into(out: Tensor, a: Tensor, b: Tensor | None) -> None:
    """``out = a * b``, rounded once; b None counts as 1."""
    if b is None:
        out.copy_(a)
    else:
        torch.mul(a, b, out=out)


def _column(scales: Tensor, gate: Tensor) -> Tensor:
    """Scales [rows] as a factor of the gate, [rows, 1] or [rows, 1, 1]."""
    return scales.view(*scales.shape, *[1] * (gate.dim() - scales.dim()))


def _product(up: Tensor | None, column: Tensor | None) -> Tensor | None:
    """The factor of the curve's value, in the dtype of ``up``."""
    if up is None or column is None:
        return column if up is None else up
    return (up * column).to(up.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _gate_and_up(preact: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up columns, [rows, blocks, block] each, or [rows, F] of one block."""
    block = spec.block
    if block is None:
        gate, up = preact.chunk(2, -1)
    else:
        gate, up = preact.view(*preact.shape[:-1], preact.shape[-1] // (2 * block), 2, block).unbind(-2)
    return gate, up


def _wide_columns(preact: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor | None]:
    """Gate and up, or all columns, in the wide dtype."""
    wide = _wide(preact.dtype)
    if not spec.gated:
        return preact.to(wide), None
    gate, up = _gate_and_up(preact, spec)
    return (gate, up) if preact.dtype == wide else (gate.to(wide), up.to(wide))


def _inputs(gate: Tensor, up: Tensor | None, spec: ActivationSpec) -> tuple[Tensor, Tensor | None]:
    """The argument of the curve and the factor of its value, clamped and offset."""
    if up is None:
        return gate, None
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate, up + spec.linear_offset if spec.linear_offset else up


def _of_unclamped(grad: Tensor, up: Tensor | None, limit: float | None) -> Tensor:
    """The gradient of up: zero where that was clamped."""
    if limit is None or up is None:
        return grad
    return grad.masked_fill(up.abs() >= _next_above(limit, up.dtype), 0)  # hardtanh_backward loses NaN


@cache
def _next_above(limit: float, dtype: torch.dtype) -> float:
    """The least number of the wide dtype that is more than a limit, once that is rounded to it."""
    if dtype == torch.float64 or limit == inf:
        return nextafter(limit, inf)
    bits: int = struct.unpack("I", struct.pack("f", limit))[0]
    above: float = struct.unpack("f", struct.pack("I", bits + 1))[0]
    return above


def _times(value: Tensor, up: Tensor | None) -> Tensor:
    """``value * up``, in the memory of ``value``."""
    return value if up is None else value.mul_(up)
