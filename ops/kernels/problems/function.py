"""Activations that users have written, over rows: on the kernels of pointwise programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...programs.program import Program
from ...values.activation_spec import ActivationSpec
from .gemm import ActivationGrads, FunctionOperands, PointwiseGrads, PointwiseRows
from .rows import FunctionOfRows, PointwiseKernels


class FunctionKernels(NamedTuple):
    """Computes an activation by its program, whose ``r0`` is the scale of the row.

    Attributes:
        of_groups: the numbers of columns and elements that the program reads; None: it reads none.
    """

    kernels: PointwiseKernels
    program: Program
    of_groups: FunctionOperands | None = None

    def forward(self, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: Tensor) -> None:
        """``out`` [..., F] = function of ``preact`` [..., C] and ``scales`` [...], rounded once."""
        self.kernels.forward(self.program, self._rows(preact, spec, scales), _flat(out))

    def backward(
        self, dpostact: Tensor, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads
    ) -> None:
        """Computes the tensors in ``out`` from ``dpostact`` [..., F]."""
        rows = self._rows(preact, spec, scales)
        (number,) = cast(tuple[Tensor], rows.numbers)
        dscales = None if out.scales is None else torch.empty_like(number)
        grads = PointwiseGrads(_flat(out.preact), None if dscales is None else (dscales,), out.vectors)
        self.kernels.backward(self.program, rows, _flat(dpostact).contiguous(), grads)
        if out.scales is not None and dscales is not None:
            out.scales.copy_(dscales.view(out.scales.shape))
        if out.postact is not None:
            self.kernels.forward(self.program, rows, _flat(out.postact))

    def _rows(self, preact: Tensor, spec: ActivationSpec, scales: Tensor | None) -> PointwiseRows:
        flat = _flat(preact).contiguous()
        if scales is None:
            scales = preact.new_ones(flat.shape[0], dtype=torch.promote_types(preact.dtype, torch.float32))
        rows = PointwiseRows(flat, spec.block, (scales.reshape(-1).contiguous(),))
        return rows if self.of_groups is None else rows._replace(**self.of_groups._asdict())


def _flat(rows: Tensor) -> Tensor:
    return rows.view(-1, rows.shape[-1]) if rows.numel() else rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])


def function_by(kernels: PointwiseKernels) -> Callable[[FunctionOfRows], None]:
    """A function that computes users' activations by these kernels."""

    def run(problem: FunctionOfRows) -> None:
        p = problem.activation
        assert p.spec.program is not None
        p.solve(FunctionKernels(kernels, p.spec.program, p.of_groups))

    return run
