"""A grouped GEMM and the activation beside it as two kernels, for backends that have no kernel for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..activation_spec import ActivationSpec
from . import elementwise
from .problem import GroupedGemm
from .pytorch.activation import ActivationGrads

Run = Callable[[GroupedGemm], None]


def forward(
    run: Run, problem: GroupedGemm, spec: ActivationSpec, scales: Tensor | None, pre: Tensor | None, hidden: Tensor
) -> None:
    """The product, into ``pre`` if there is one, then the activation."""
    product = hidden.new_empty(problem.rows, problem.mnk[1]) if pre is None else pre
    run(replace(problem, out=product))
    elementwise.forward(product, spec, scales, hidden)


def backward(
    run: Run, problem: GroupedGemm, pre: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads
) -> None:
    """The product, then the activation's backward."""
    dhidden = pre.new_empty(problem.rows, problem.mnk[1])
    run(replace(problem, out=dhidden))
    elementwise.backward(dhidden, pre, spec, scales, out)
