"""A linear layer without groups: plain matrix products of torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...fuser import Gradient, Grads, TensorSpec
from ..parameters.stored import drop_note, take_basic_ops
from ..parameters.weight_grads import WeightGrads
from ..values.checks import check_matrix_input, check_parameter, check_sizes, product_dtype


class Linear(WeightGrads):
    """``y = x @ weight.T + bias`` over the last dimension, as ``torch.nn.Linear``.

    Args:
        in_features: K; ``x`` is [..., K].
        out_features: N; ``weight`` is [N, K].
        bias: whether there is a ``bias`` [N].
        accumulate_into_main_grad: the weight gradient goes to ``weight.main_grad``, as in :class:`GroupedLinear`.

    Raises:
        ArgumentError: a size that is not a positive int, or a dtype that is not floating-point with at least 16 bits.
        RuntimeError: in a backward that accumulates into ``main_grad``, if that is missing or does not fit.
    """

    weight: nn.Parameter
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
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("Linear", dtype, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.num_groups, self.transposed_weight = 1, False
        self.init_expert_parameters()
        weight = torch.empty((out_features, in_features), device=device, dtype=dtype)
        self.add_expert_parameter("weight", weight, single=True)
        empty_bias = torch.empty(out_features, device=device, dtype=dtype)
        self.bias = nn.Parameter(empty_bias) if bias else None
        self.init_weight_grads(accumulate_into_main_grad, delay_wgrad_compute=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter uniformly from ±1/sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: Any) -> None:
        take_basic_ops(state_dict, prefix)
        drop_note(state_dict, prefix, args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def check_without_x(self) -> None:
        self._check_parameters(None)

    def check(self, x: TensorSpec, *, autocast_dtype: torch.dtype | None) -> TensorSpec:
        dtype = check_matrix_input(x, self.weight, self.in_features, autocast_dtype, dims=1)
        self._check_parameters(x.device)
        return TensorSpec((*x.shape[:-1], self.out_features), dtype, x.device)

    def _check_parameters(self, device: torch.device | None) -> None:
        check_parameter("weight", self.weight, (self.out_features, self.in_features), device)
        if self.bias is not None:
            check_parameter("bias", self.bias, (self.out_features,), device)

    def fwd(self, x: Tensor, *, needs_grad: frozenset[str], autocast_dtype: torch.dtype | None) -> tuple[Tensor, Saved]:
        dtype = product_dtype(x.dtype, autocast_dtype)
        rows, weight = x.to(dtype), self.weight.to(dtype)
        y = F.linear(rows, weight, None if self.bias is None else self.bias.to(dtype))
        y = y.detach() if y._is_view() else y  # so that autograd lets others write to it
        return y, self.Saved(rows if "weight" in needs_grad else None, weight if "x" in needs_grad else None)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        x, weight = saved
        rows = dy.reshape(-1, self.out_features)
        grads: dict[str, Gradient] = {}
        if weight is not None:
            grads["x"] = lambda: dy @ weight
        if x is not None and self.accumulate_into_main_grad:
            sizes = torch.full((1,), rows.shape[0], device=rows.device)
            grads |= self.weight_grads(rows, x.reshape(-1, self.in_features), sizes, needs_grad)
        elif x is not None:
            grads["weight"] = lambda: (rows.mT @ x.reshape(-1, self.in_features)).to(self.weight.dtype)
        if self.bias is not None:
            dtype = self.bias.dtype
            grads["bias"] = lambda: rows.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dtype)
        return grads

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
