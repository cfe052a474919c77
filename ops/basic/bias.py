"""A bias for every column."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...fuser import Grads, Op, Promises, TensorSpec
from ..values.checks import check_features, check_floats, check_parameter, check_sizes
from .link import Link, linear_program


class Bias(Op):
    """``y = x + bias``, for an input of ``features`` columns; the parameter starts at zero.

    Raises:
        ArgumentError: ``features`` is not a positive int, or the dtype is not floating-point with at least 16 bits.
    """

    promises = Promises(replayable=True, values_checked=frozenset())
    column_dims: ClassVar[dict[str, int | None]] = {"bias": -1}

    def __init__(
        self, features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_sizes("Bias", dtype, features=features)
        self.features = features
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias to zero."""
        nn.init.zeros_(self.bias)

    @property
    def link(self) -> Link:
        """The op as a link of a chain."""
        return Link(linear_program(torch.add, "a0"), columns=("bias",))

    def check_without_x(self) -> None:
        check_parameter("bias", self.bias, (self.features,), None)

    def check(self, x: TensorSpec) -> TensorSpec:
        check_floats(x)
        check_features(x, self.features)
        check_parameter("bias", self.bias, (self.features,), x.device)
        return x

    def fwd(self, x: Tensor) -> tuple[Tensor, None]:
        return (x + self.bias).to(x.dtype), None

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        wide = torch.promote_types(dy.dtype, torch.float32)
        return {"x": dy, "bias": lambda: dy.reshape(-1, self.features).sum(0, dtype=wide).to(self.bias.dtype)}

    def extra_repr(self) -> str:
        return f"{self.features}"
