"""The kernel door while a compiler traces: calls of the custom ops that :mod:`custom_ops` registers.

The functions take what the door's of the same names take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from ...fuser.config import active_config
from ..activation_spec import ActivationSpec
from .problem import ActivationGrads, Layout, Matrices

_ops = torch.ops.fusible
Factor = float | Tensor | None


def grouped_gemm(
    layout: Layout,
    a: Tensor,
    b: Matrices,
    split_sizes: Tensor,
    *,
    out: Matrices | None = None,
    out_dtype: torch.dtype | None = None,
    alpha: Factor = None,
    beta: Factor = None,
    bias: Matrices | None = None,
    bias_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Matrices:
    factors, how = (*_factor(alpha), *_factor(beta)), (_listed(bias), bias_scale, row_scale, switches())
    if out is None:
        product: Tensor = _ops.grouped_gemm(layout.value, a, _listed(b), split_sizes, out_dtype, *factors[:2], *how)
        return product
    _ops.grouped_gemm_out(layout.value, a, _listed(b), split_sizes, _listed(out), *factors, *how)
    return out


def grouped_linear_activation(
    x: Tensor,
    weight: Matrices,
    split_sizes: Tensor,
    activation: ActivationSpec,
    *,
    bias: Matrices | None = None,
    bias_scale: Tensor | None = None,
    scales: Tensor | None = None,
    keep_pre: bool,
    interior: bool = False,
) -> tuple[Tensor | None, Tensor]:
    how = (_listed(bias), bias_scale, scales, keep_pre, interior, switches())
    pre, hidden = _ops.grouped_linear_activation(x, _listed(weight), split_sizes, *astuple(activation), *how)
    return pre if keep_pre else None, hidden


def grouped_linear_activation_backward(
    dy: Tensor,
    weight: Matrices,
    pre: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    *,
    scales: Tensor | None = None,
    want_scales: bool,
    want_hidden: bool,
    bias_dtype: torch.dtype | None = None,
) -> ActivationGrads:
    given, wanted = (dy, _listed(weight), pre, split_sizes), (want_scales and scales is not None, want_hidden)
    how = *wanted, bias_dtype, switches()
    *made, bias = _ops.grouped_linear_activation_backward(*given, *astuple(activation), scales, *how)
    grads = _grads(made, *wanted)
    return grads if bias_dtype is None else grads._replace(bias=bias)


def activate(pre: Tensor, activation: ActivationSpec, scales: Tensor | None = None) -> Tensor:
    hidden: Tensor = _ops.activate(pre, *astuple(activation), scales)
    return hidden


def activate_backward(
    dhidden: Tensor,
    pre: Tensor,
    activation: ActivationSpec,
    scales: Tensor | None = None,
    *,
    want_scales: bool = False,
    want_hidden: bool = False,
) -> ActivationGrads:
    wanted = (want_scales and scales is not None, want_hidden)
    return _grads(_ops.activate_backward(dhidden, pre, *astuple(activation), scales, *wanted), *wanted)


def column_sums(tokens: Tensor, split_sizes: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    sums: Tensor = _ops.column_sums(tokens, split_sizes, dtype, scale)
    return sums


def row_dots(tokens: Tensor, vectors: Matrices, split_sizes: Tensor, dtype: torch.dtype) -> Tensor:
    dots: Tensor = _ops.row_dots(tokens, _listed(vectors), split_sizes, dtype)
    return dots


def switches() -> str:
    """Those of the switches in force that a kernel obeys, as the compiled code shall, whatever is in force then."""
    config = active_config()
    return f"{config.backend} strict" if config.strict else config.backend


def _listed(matrices: Matrices | None) -> list[Tensor] | None:
    """As a custom op takes them: one stacked tensor is a list of one, which has a dimension more."""
    return None if matrices is None else [matrices] if isinstance(matrices, Tensor) else list(matrices)


def _factor(factor: Factor) -> tuple[float | None, Tensor | None]:
    return (None, factor) if isinstance(factor, Tensor) else (factor, None)


def _grads(made: Sequence[Tensor], scales: bool, hidden: bool) -> ActivationGrads:
    return ActivationGrads(made[0], made[1] if scales else None, made[2] if hidden else None)
