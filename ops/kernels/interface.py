"""What a backend offers: each is a module of this package that fits these protocols."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..activation_spec import ActivationSpec
from .problem import GroupedGemm, Matrices
from .pytorch.activation import ActivationGrads


class Backend(Protocol):
    """An implementation of the grouped GEMM, alone and with an activation."""

    @property
    def NAME(self) -> str: ...

    def refusal(self, problem: GroupedGemm, /) -> str | None:
        """Why the problem cannot be run here; None: it can."""

    def run(self, problem: GroupedGemm, /) -> None:
        """Computes ``problem.out``. Our own zeroes the tail of rows that are fresh, too."""

    def linear_activation(
        self,
        problem: GroupedGemm,
        spec: ActivationSpec,
        scales: Tensor | None,
        pre: Tensor | None,
        hidden: Tensor,
        /,
    ) -> None:
        """``hidden`` = activation of the product, times ``scales``; the product into ``pre``, if there is one."""

    def linear_activation_backward(
        self, problem: GroupedGemm, pre: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads, /
    ) -> None:
        """From the product, the gradient of the hidden rows, and ``pre``: what ``out`` has room for.

        Our own gives that of the bias and zeroes the tail of that of the scales, too; after others, row kernels do.
        """


class RowKernels(Protocol):
    """What else knows groups."""

    def column_sums(self, rows: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None, /) -> None:
        """``out[g]`` = the sum of the rows of group g, each times its ``scale`` [T], if there is one."""

    def row_dots(self, rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor, /) -> None:
        """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""

    def zero_tail(self, out: Tensor, split_sizes: Tensor, /) -> None:
        """Zeros the rows past the last group."""
