"""Our own CUDA kernel that transposes bytes. It reads and writes each byte once, through shared memory.

It writes memory that the door has just allocated, so the version counter need not change.
"""

from __future__ import annotations

from ..extension import compiled, hardware_refusal, stream
from ..problems.transposition import ByteTransposition


def refusal(p: ByteTransposition) -> str | None:
    """Why the kernel does not transpose matrices [E, N, K]; None: it does, whatever their sizes."""
    data = p.data
    if (why := hardware_refusal(data)) is not None:
        return why
    if data.element_size() != 1:
        return f"transposes elements of 8 bits, not {data.dtype}"
    if not data.is_contiguous():
        return f"needs dense matrices, got strides {list(data.stride())}"
    return None


def run(p: ByteTransposition) -> None:
    """One launch on the current stream: ``out[e, k, n] = data[e, n, k]``."""
    device, (groups, rows, columns) = p.data.get_device(), p.data.shape
    compiled().transpose_bytes(
        device=device,
        stream=stream(device),
        groups=groups,
        rows=rows,
        columns=columns,
        source=p.data.data_ptr(),
        out=p.out.data_ptr(),
    )
