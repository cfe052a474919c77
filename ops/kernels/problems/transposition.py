"""The statement of a transposition of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class ByteTransposition:
    """``out`` [E, K, N] = the transposes of dense matrices ``data`` [E, N, K] of a dtype of 8 bits."""

    data: Tensor
    out: Tensor

    @property
    def bytes(self) -> int:
        return 2 * self.data.nbytes

    def __str__(self) -> str:
        return " x ".join(map(str, self.data.shape))
