"""What the dispatcher chooses from: each is a module of this package that fits one of these protocols."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...programs.program import Program
from ...values.activation_spec import ActivationSpec
from .fake_quantized import FakeQuantizing
from .gemm import ActivationGrads, GroupedGemm, Matrices, PointwiseGrads, PointwiseRows
from .quantized import Multiplying, Quantizing


class Backend(Protocol):
    """An implementation of the grouped GEMM."""

    @property
    def NAME(self) -> str: ...

    def refusal(self, problem: GroupedGemm, /) -> str | None:
        """Why the product cannot be run here, whatever its epilogue; None: it can."""

    def epilogue_refusal(self, problem: GroupedGemm, /) -> str | None:
        """Why the epilogue cannot be part of the product, so that it follows as a kernel of its own; None: it can."""

    def run(self, problem: GroupedGemm, /) -> None:
        """Computes ``problem.out`` and whatever else the epilogue gives, if it has one that is not refused.

        Our own backend zeroes the tail of rows that are fresh, too. With :class:`ActivateBackward` it also gives the
        gradient of the bias and zeroes the tail of that of the scales, which row kernels do after others.
        """


class ActivationKernels(Protocol):
    """An activation and its backward, over rows that are there."""

    @property
    def NAME(self) -> str: ...

    def forward(self, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: Tensor, /) -> None:
        """``out`` [..., F] = activation of ``preact`` [..., C], times ``scales`` [...], rounded once."""

    def backward(
        self, dpostact: Tensor, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads, /
    ) -> None:
        """From ``dpostact`` [..., F] what ``out`` has tensors for; computes the activation again from ``preact``."""


class PointwiseKernels(Protocol):
    """A pointwise program and its gradients, over rows that are there."""

    @property
    def NAME(self) -> str: ...

    def forward(self, program: Program, rows: PointwiseRows, out: Tensor, /) -> None:
        """Fills ``out`` [rows, C]."""

    def backward(self, program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads, /) -> None:
        """Fills what ``out`` has tensors for, from ``dy`` [rows, C]."""


class RowKernels(Protocol):
    """What else knows groups."""

    @property
    def NAME(self) -> str: ...

    def column_sums(self, rows: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None, /) -> None:
        """``out[g]`` = the sum of the rows of group g, each times its ``scale`` [T], if there is one."""

    def row_dots(self, rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor, /) -> None:
        """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""

    def zero_tail(self, out: Tensor, split_sizes: Tensor, /) -> None:
        """Zeros the rows past the last group."""


class Quantizers(Protocol):
    """What makes quantised copies."""

    @property
    def NAME(self) -> str: ...

    def refusal(self, problem: Quantizing, /) -> str | None:
        """Why the copies cannot be made here; None: they can."""

    def run(self, problem: Quantizing, /) -> None:
        """Fills the copies, and what else the problem has tensors for."""


class FakeQuantizers(Protocol):
    """What makes the values of quantised copies."""

    @property
    def NAME(self) -> str: ...

    def refusal(self, problem: FakeQuantizing, /) -> str | None:
        """Why the values cannot be made here; None: they can."""

    def run(self, problem: FakeQuantizing, /) -> None:
        """Fills what the problem has tensors for."""


class ScaledProducts(Protocol):
    """Products of quantised operands."""

    @property
    def NAME(self) -> str: ...

    def refusal(self, problem: Multiplying, /) -> str | None:
        """Why the product cannot be run here; None: it can."""

    def run(self, problem: Multiplying, /) -> None:
        """Computes ``problem.out``."""
