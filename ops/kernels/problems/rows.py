"""The statements of passes over rows: activations, pointwise programs, sums and products by group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...programs.program import Program
from ...values.activation_spec import ActivationSpec
from .gemm import ActivationGrads, FunctionOperands, Matrices, PointwiseGrads, PointwiseRows, nbytes


@dataclass(slots=True)
class ActivateRows:
    """``out`` [..., F] = activation of ``preact`` [..., C], times ``scales`` [...], rounded once.

    Attributes:
        of_groups: the numbers of columns and elements that a user's function reads; None: it reads none.
    """

    preact: Tensor
    spec: ActivationSpec
    scales: Tensor | None
    out: Tensor
    of_groups: FunctionOperands | None = None

    @property
    def beside(self) -> tuple[Tensor | None, ...]:
        """The rows that are read or written beside ``preact``."""
        return (self.out,)

    @property
    def bytes(self) -> int:
        return nbytes(self.preact, self.scales, self.out)


@dataclass(slots=True)
class ActivateRowsBackward:
    """From ``dpostact`` [..., F] what ``out`` has tensors for; the activation is computed again from ``preact``."""

    dpostact: Tensor
    preact: Tensor
    spec: ActivationSpec
    scales: Tensor | None
    out: ActivationGrads
    of_groups: FunctionOperands | None = None

    @property
    def beside(self) -> tuple[Tensor | None, ...]:
        """As of :class:`ActivateRows`."""
        return self.dpostact, self.out.preact, self.out.postact

    @property
    def bytes(self) -> int:
        return nbytes(self.preact, self.scales, self.dpostact, *self.out[:3])


Activating = ActivateRows | ActivateRowsBackward


@dataclass(slots=True)
class FunctionOfRows:
    """An activation that a user has written: ``spec`` has a program, which kernels of pointwise programs compute."""

    activation: Activating

    @property
    def rows(self) -> PointwiseRows:
        """What the program reads."""
        p = self.activation
        rows = PointwiseRows(p.preact, p.spec.block, None if p.scales is None else (p.scales,))
        return rows if p.of_groups is None else rows._replace(**p.of_groups._asdict())

    @property
    def bytes(self) -> int:
        return self.activation.bytes


@dataclass(slots=True)
class PointwiseForward:
    """``out`` [rows, C] = the value of a program over rows, whose x are the ``columns``."""

    program: Program
    columns: Tensor
    rows: PointwiseRows
    out: Tensor

    @property
    def bytes(self) -> int:
        return nbytes(self.columns, self.rows.operands, self.out)


@dataclass(slots=True)
class PointwiseBackward:
    """Gradients of a program over rows, those that ``out`` has tensors for; the ``columns`` [rows, C] are dy."""

    program: Program
    columns: Tensor
    rows: PointwiseRows
    out: PointwiseGrads

    @property
    def bytes(self) -> int:
        return nbytes(self.columns, self.rows.operands, self.rows.x, *self.out)


@dataclass(slots=True)
class ColumnSums:
    """``out[g]`` [N] = the sum of the rows [T, N] of group g, each times its ``scale`` [T], if there is one."""

    rows: Tensor
    split_sizes: Tensor
    out: Tensor
    scale: Tensor | None = None

    @property
    def bytes(self) -> int:
        return nbytes(self.rows, self.scale, self.out)


@dataclass(slots=True)
class RowDots:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""

    rows: Tensor
    vectors: Matrices
    split_sizes: Tensor
    out: Tensor

    @property
    def bytes(self) -> int:
        return nbytes(self.rows, self.vectors, self.out)


@dataclass(slots=True)
class ZeroTail:
    """Zeros the rows past the last group. No bytes are counted: with every row in use there is none."""

    rows: Tensor
    split_sizes: Tensor

    @property
    def bytes(self) -> int:
        return 0


def stated(problem: Activating) -> Activating | FunctionOfRows:
    """The problem as kernels are asked to solve it: those of programs where the activation is a user's function."""
    return problem if problem.spec.program is None else FunctionOfRows(problem)
