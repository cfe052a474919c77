"""A shared expert: a dense MLP that every token passes, next to those that it is routed to."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...fuser import Sequential
from ..basic.linear import Linear
from ..basic.named_activation import activation_op
from ..values.activation_spec import ActivationSpec


class SharedExpert(nn.Module):
    """``down(act(up(x)))``, and with ``gated`` that times ``sigmoid(gate @ x)``, one number for each token.

    Several shared experts of one width are a single one of their widths' sum.
    """

    gate: nn.Parameter | None

    def __init__(
        self,
        features: int,
        width: int,
        spec: ActivationSpec,
        *,
        gated: bool,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        columns = 2 * width if spec.gated else width
        self.mlp = Sequential(
            OrderedDict(
                up=Linear(features, columns, bias=bias, device=device, dtype=dtype),
                activation=activation_op(spec),
                down=Linear(width, features, bias=bias, device=device, dtype=dtype),
            )
        )
        self.register_parameter("gate", None)
        if gated:
            self.gate = nn.Parameter(torch.empty(1, features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter as its linear does."""
        for linear in (op for op in self.mlp if isinstance(op, Linear)):
            linear.reset_parameters()
        if self.gate is not None:
            bound = 1 / math.sqrt(self.gate.shape[1])
            nn.init.uniform_(self.gate, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H], from tokens [T, H]."""
        y: Tensor = self.mlp(x)
        return y if self.gate is None else y * F.linear(x, self.gate).sigmoid()
