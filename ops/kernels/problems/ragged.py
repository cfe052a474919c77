"""The problem of a grouped GEMM whose groups have their own shapes on both sides."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...values.grouped_tensor import GroupedTensor
from .gemm import Layout, nbytes


@dataclass(slots=True)
class RaggedGemm:
    """``out_g = alpha_g * A_g B_g + bias_g + beta_g * out_g``; every group has its own rows, columns and depth.

    Attributes:
        layout: which operand is transposed: NT: a [M_g, K_g], b [N_g, K_g]. NN: b [K_g, N_g]. TN: a [K_g, M_g].
        out: M_g x N_g, one after another; its dims follow from those of a and b.
        alpha, beta: a factor, or one a group [E]; ``beta`` None: ``out`` is not read.
        bias: [E, N], where all groups have N columns.
        fresh: ``out`` was allocated for this: elements after its last group must be zero, and its version stays.
    """

    layout: Layout
    a: GroupedTensor
    b: GroupedTensor
    out: GroupedTensor
    alpha: float | Tensor | None = None
    beta: float | Tensor | None = None
    bias: Tensor | None = None
    fresh: bool = False

    @property
    def bytes(self) -> int:
        """Every operand and the result once."""
        return nbytes(self.a.data, self.b.data, self.out.data, self.bias)

    @property
    def groups(self) -> int:
        return self.a.num_groups
