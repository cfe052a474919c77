"""The statements of passes over rows: activations, pointwise programs, sums and products by group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from ...programs.program import Program
from ...values.activation_spec import ActivationSpec
from .gemm import ActivationGrads, Counted, FunctionOperands, Matrices, PointwiseGrads, PointwiseRows, nbytes


class ActivationKernels(Protocol):
    """A module of kernels for activations."""

    def forward(self, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: Tensor, /) -> None:
        """See :class:`ActivateRows`."""

    def backward(
        self, dpostact: Tensor, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads, /
    ) -> None:
        """See :class:`ActivateRowsBackward`."""


class PointwiseKernels(Protocol):
    """A module of kernels for pointwise programs."""

    def forward(self, program: Program, rows: PointwiseRows, out: Tensor, /) -> None:
        """See :class:`PointwiseForward`."""

    def backward(self, program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads, /) -> None:
        """See :class:`PointwiseBackward`."""


class RowKernels(Protocol):
    """A module of kernels for passes over rows that know groups."""

    def column_sums(self, rows: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None, /) -> None:
        """See :class:`ColumnSums`."""

    def row_dots(self, rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor, /) -> None:
        """See :class:`RowDots`."""

    def zero_tail(self, out: Tensor, split_sizes: Tensor, /) -> None:
        """See :class:`ZeroTail`."""


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

    def solve(self, kernels: ActivationKernels) -> None:
        kernels.forward(self.preact, self.spec, self.scales, self.out)


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
        """The same as for :class:`ActivateRows`."""
        return self.dpostact, self.out.preact, self.out.postact

    @property
    def bytes(self) -> int:
        return nbytes(self.preact, self.scales, self.dpostact, *self.out[:3])

    def solve(self, kernels: ActivationKernels) -> None:
        kernels.backward(self.dpostact, self.preact, self.spec, self.scales, self.out)


Activating = ActivateRows | ActivateRowsBackward


@dataclass(slots=True)
class FunctionOfRows:
    """An activation that a user has written: ``spec`` has a program, which kernels of pointwise programs compute."""

    activation: Activating

    @property
    def rows(self) -> PointwiseRows:
        """The operands of the program."""
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

    def solve(self, kernels: PointwiseKernels) -> None:
        kernels.forward(self.program, self.rows, self.out)


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

    def solve(self, kernels: PointwiseKernels) -> None:
        kernels.backward(self.program, self.rows, self.columns, self.out)


@dataclass(slots=True)
class ColumnSums(Counted):
    """``out[g]`` [N] = the sum of the rows [T, N] of group g, each times its ``scale`` [T], if there is one."""

    PASS: ClassVar[str] = "column sums"
    rows: Tensor
    split_sizes: Tensor
    out: Tensor
    scale: Tensor | None = None

    def solve(self, kernels: RowKernels) -> None:
        kernels.column_sums(self.rows, self.split_sizes, self.out, self.scale)


@dataclass(slots=True)
class RowDots(Counted):
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""

    PASS: ClassVar[str] = "row dots"
    rows: Tensor
    vectors: Matrices
    split_sizes: Tensor
    out: Tensor

    def solve(self, kernels: RowKernels) -> None:
        kernels.row_dots(self.rows, self.vectors, self.split_sizes, self.out)


@dataclass(slots=True)
class ZeroTail:
    """Zeroes the rows past the last group. It counts no bytes: if every row is in use, there are none."""

    PASS: ClassVar[str] = "zero tail"
    rows: Tensor
    split_sizes: Tensor

    @property
    def out(self) -> Tensor:
        return self.rows

    @property
    def bytes(self) -> int:
        return 0

    def solve(self, kernels: RowKernels) -> None:
        kernels.zero_tail(self.rows, self.split_sizes)


RowPass = ColumnSums | RowDots | ZeroTail
PointwisePass = PointwiseForward | PointwiseBackward


def stated(problem: Activating) -> Activating | FunctionOfRows:
    """The problem as kernels are asked to solve it: those of programs where the activation is a user's function."""
    return problem if problem.spec.program is None else FunctionOfRows(problem)
