"""The door to what transposes bytes: those of a weight that lies as its forward reads it, for the gradient of rows."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ....fuser.contract import tracing as trace
from ...formats.recipe import transposed_bytes
from ..dispatch import native_refusal
from ..hopper import transpose as hopper
from ..operators.custom_ops import kernel


def new_transposed(data: Tensor) -> Tensor:
    """Memory for the transposes."""
    groups, rows, columns = data.shape
    return data.new_empty((groups, columns, rows))


@kernel(new_transposed)
def transpose_bytes(data: Tensor) -> Tensor:
    """The transposes [E, K, N] of matrices [E, N, K] of a dtype of 8 bits, dense."""
    why = native_refusal(partial(hopper.refusal, data), "transposition of bytes", data)
    if trace.active():
        _record(data, why)
        return new_transposed(data)
    if why is not None:
        return transposed_bytes(data)
    out = new_transposed(data)
    if out.numel():
        hopper.run(data, out)
    return out


def _record(data: Tensor, why: str | None) -> None:
    """Tells a trace of our own kernel, or of PyTorch's in its place, and why."""
    name = hopper.NAME if why is None else "torch"
    reason = why if why and data.is_cuda else ""  # on a CPU nobody expects another
    sizes, moved = " x ".join(map(str, data.shape)), 2 * data.nbytes
    trace.record(trace.KernelCall(f"{name} (transpose)", reason, 0, moved, f"{sizes}, {moved / 1e6:.1f} MB"))
