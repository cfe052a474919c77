"""The statement of the decoding of a weight that is stored in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...formats.decoding import Decoding
from .gemm import nbytes


@dataclass(slots=True)
class WeightDecoding:
    """``out`` [E, N, K] = the values of stored parts, rounded once from float32.

    Attributes:
        data, scales, factors: the parts, as the format stores them.
        name: of the format.
        decoding: the format in the terms of kernels; None: it has none.
        define: computes ``out`` by the definition of the format.
    """

    data: Tensor
    scales: Tensor
    factors: Tensor | None
    out: Tensor
    name: str
    decoding: Decoding | None
    define: Callable[[Tensor], None]

    @property
    def bytes(self) -> int:
        return nbytes(self.data, self.scales, [self.factors], self.out)

    def __str__(self) -> str:
        bits = 8 * nbytes(self.data, self.scales, [self.factors]) / max(1, self.out.numel())
        return f"{self.name}, {' x '.join(map(str, self.data.shape))} bytes, {bits:.3g} bits a weight"
