"""Row scales, such as router probabilities, and constant scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads, Op, Promises, TensorSpec
from ..values.checks import check_floats, check_numbers, check_rows
from .link import Link, linear_program


class Scale(Op):
    """``y = x * scales[:, None]``, computed in the wider of the two dtypes and rounded once to that of ``x``.

    It comes before the second linear of an expert (TransformerEngine, Megatron) or after it (Hugging Face, torchtitan).
    The two differ if that linear has a bias.

    Keyword Args:
        scales: a number for every row of ``x``, shape ``x.shape[:-1]``, any floating-point dtype. Its gradient is
            ``sum(dy * x)`` over the columns.
    """

    promises = Promises(replayable=True, values_checked=frozenset())

    class Saved(NamedTuple):
        x: Tensor | None
        scales: Tensor

    @property
    def link(self) -> Link:
        """The op as a link of a chain."""
        return Link(linear_program(torch.mul, "r0"), rows=("scales",))

    def check_without_x(self, *, scales: Any = None) -> None:
        if scales is not None:
            check_rows("scales", scales, None)

    def check(self, x: TensorSpec, *, scales: Tensor) -> TensorSpec:
        check_floats(x)
        check_rows("scales", scales, x)
        return x

    def fwd(self, x: Tensor, *, scales: Tensor, needs_grad: frozenset[str]) -> tuple[Tensor, Saved]:
        return (x * scales.unsqueeze(-1)).to(x.dtype), self.Saved(x if "scales" in needs_grad else None, scales)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        x, scales = saved
        grads: dict[str, Gradient] = {"x": lambda: (dy * scales.unsqueeze(-1)).to(dy.dtype)}
        if x is not None:
            wide = torch.promote_types(torch.promote_types(dy.dtype, scales.dtype), torch.float32)
            grads["scales"] = lambda: (dy.to(wide) * x).sum(-1).to(scales.dtype)
        return grads


class ConstantScale(Op):
    """``y = x * scale`` for a constant number.

    Raises:
        ArgumentError: ``scale`` is not a finite number.
    """

    promises = Promises(replayable=True, values_checked=frozenset())

    def __init__(self, scale: float) -> None:
        super().__init__()
        check_numbers("ConstantScale", scale=scale)
        self.scale = float(scale)

    @property
    def link(self) -> Link:
        """The op as a link of a chain."""
        return Link(linear_program(torch.mul, "c0"), constants=(self.scale,))

    def check(self, x: TensorSpec) -> TensorSpec:
        whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
        return x._replace(dtype=torch.get_default_dtype()) if whole else x

    def fwd(self, x: Tensor) -> tuple[Tensor, None]:
        return x * self.scale, None

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {"x": lambda: dy * self.scale}

    def extra_repr(self) -> str:
        return f"{self.scale}"
