"""The products of a router's gate, as the door hands them to a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from .gemm import Counted, Layout

MANY_TOKENS = 4096
"""The fewest tokens whose products our kernels take unasked. Each is launched from Python, which costs the host 600 µs
in a forward and backward."""


@final
@dataclass(slots=True)
class GateProduct(Counted):
    """A product whose result is float32: few but important numbers.

    Attributes:
        layout: NT: logits [T, E] of tokens ``a`` [T, H] by the weight ``b`` [E, H]. NN: the gradient [T, H] of the
            tokens, from the gradient ``a`` [T, E] of the logits. TN: the gradient [E, H] of the weight, from the
            gradient ``a`` [T, E] of the logits and the tokens ``b`` [T, H].
        a, b: of any floating-point dtypes.
        bias: [E], added to logits.
        out: float32, where kernels of a backend write; None while they are chosen.
    """

    PASS: ClassVar[str] = "gate"
    layout: Layout
    a: Tensor
    b: Tensor
    bias: Tensor | None
    out: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the result."""
        rows = self.a.shape[1 if self.layout is Layout.TN else 0]
        return rows, self.b.shape[0 if self.layout is Layout.NT else 1]

    @property
    def flops(self) -> int:
        """The operations of one product, however many passes make it."""
        return 2 * self.a.numel() * self.shape[1]
