"""The doors to a layer's routed experts while a compiler traces: the custom ops of ``library_routed``.

The functions take what the doors' of the same names take.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from .custom_ops import switches
from .hopper.routed_mlp import Experts

_ops = torch.ops.fusible


def routed_mlp(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y: Tensor = _ops.routed_mlp(x, index, weights, *_listed(experts), switches())
    return y


def routed_mlp_forward(
    experts: Experts, x: Tensor, index: Tensor, weights: Tensor, keep_pre: bool, own: bool
) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = _ops.routed_mlp_forward(x, index, weights, *_listed(experts), keep_pre, own, switches())
    return made


def routed_activation_backward(
    experts: Experts,
    needs: tuple[bool, ...],
    dy: Tensor,
    routing: tuple[Any, ...],
    scales: Tensor,
    pre: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    between = *astuple(experts.spec), experts.transposed
    made: tuple[Tensor, ...] = _ops.routed_activation_backward(
        *(dy, *routing, scales, pre, experts.down, experts.up_bias, experts.down_bias, *between, list(needs), dtype),
        switches(),
    )
    return made


def routed_input_grad(dpre: Tensor, up: Tensor, transposed: bool, routing: tuple[Any, ...]) -> Tensor:
    dx: Tensor = _ops.routed_input_grad(dpre, up, transposed, *routing, switches())
    return dx


def routed_weight_grad(weight: Tensor, tokens: Tensor, rows: Tensor, leads: bool, routing: tuple[Any, ...]) -> Tensor:
    grad: Tensor = _ops.routed_weight_grad(weight, tokens, rows, leads, *routing, switches())
    return grad


def _listed(experts: Experts) -> tuple[Any, ...]:
    *tensors, spec, transposed = experts
    return *tensors, *astuple(spec), transposed
