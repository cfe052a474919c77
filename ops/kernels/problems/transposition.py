"""The statement of a transposition of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .gemm import Counted


@dataclass(slots=True)
class ByteTransposition(Counted):
    """``out`` [E, K, N] = the transposes of dense matrices ``data`` [E, N, K] of a dtype of 8 bits."""

    data: Tensor
    out: Tensor

    def __str__(self) -> str:
        return " x ".join(map(str, self.data.shape))
