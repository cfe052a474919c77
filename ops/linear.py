"""A linear layer without groups: plain matrix products of torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..fuser import Gradient, Grads, Op, Spec
from .checks import check_matrix_input, check_parameter, check_sizes, product_dtype
from .stored import drop_note, take_basic_ops


class Linear(Op):
    """``y = x @ weight.T + bias`` over the last dimension, as ``torch.nn.Linear``.

    Args:
        in_features: K; ``x`` is [..., K] with at least two dimensions.
        out_features: N; ``weight`` is [N, K].
        bias: whether there is a ``bias`` [N].

    Raises:
        ArgumentError: a size that is no int from 1 on, or a dtype that is not floating-point, of at least 16 bits.
    """

    bias: nn.Parameter | None

    class Saved(NamedTuple):
        x: Tensor | None
        weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("Linear", dtype, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        empty_bias = torch.empty(out_features, device=device, dtype=dtype)
        self.bias = nn.Parameter(empty_bias) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter uniformly from ±1/sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        take_basic_ops(state_dict, prefix)
        drop_note(state_dict, prefix, args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def check(self, x: Spec, *, autocast_dtype: torch.dtype | None) -> Spec:
        dtype = check_matrix_input(x, self.weight, self.in_features, autocast_dtype)
        check_parameter("weight", self.weight, (self.out_features, self.in_features), x.device)
        if self.bias is not None:
            check_parameter("bias", self.bias, (self.out_features,), x.device)
        return Spec((*x.shape[:-1], self.out_features), dtype, x.device)

    def fwd(self, x: Tensor, *, needs_grad: frozenset[str], autocast_dtype: torch.dtype | None) -> tuple[Tensor, Saved]:
        dtype = product_dtype(x.dtype, autocast_dtype)
        rows, weight = x.to(dtype), self.weight.to(dtype)
        y = F.linear(rows, weight, None if self.bias is None else self.bias.to(dtype))
        return y, self.Saved(rows if "weight" in needs_grad else None, weight if "x" in needs_grad else None)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        x, weight = saved
        rows = dy.reshape(-1, self.out_features)
        grads: dict[str, Gradient] = {}
        if weight is not None:
            grads["x"] = lambda: dy @ weight
        if x is not None:
            grads["weight"] = lambda: (rows.mT @ x.reshape(-1, self.in_features)).to(self.weight.dtype)
        if self.bias is not None:
            dtype = self.bias.dtype
            grads["bias"] = lambda: rows.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dtype)
        return grads

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
