"""The door to the kernels that transpose bytes: a weight in the layout of its forward, for the gradient of rows."""

from __future__ import annotations

from torch import Tensor

from .. import dispatch
from ..operators.custom_ops import kernel
from ..problems.transposition import ByteTransposition


def new_transposed(data: Tensor) -> Tensor:
    """Memory for the transposes."""
    groups, rows, columns = data.shape
    return data.new_empty((groups, columns, rows))


@kernel(new_transposed)
def transpose_bytes(data: Tensor) -> Tensor:
    """The transposes [E, K, N] of matrices [E, N, K] of a dtype of 8 bits, dense."""
    out = new_transposed(data)
    dispatch.run(ByteTransposition(data, out))
    return out
