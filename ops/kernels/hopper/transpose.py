"""Our own CUDA kernel that transposes bytes: it reads each once and writes it once, through shared memory.

It writes memory that the door has just allocated and no one else has seen, so its version stays.
"""

from __future__ import annotations

from torch import Tensor

from ..extension import compiled, device_refusal, stream

NAME = "hopper"


def refusal(data: Tensor) -> str | None:
    """Why the kernel does not transpose matrices [E, N, K]; None: it does, whatever their sizes."""
    if not data.is_cuda:
        return f"needs a CUDA device, got {data.device.type}"
    if (why := device_refusal(data.get_device())) is not None:
        return why
    if data.element_size() != 1:
        return f"transposes elements of 8 bits, not {data.dtype}"
    if not data.is_contiguous():
        return f"needs dense matrices, got strides {list(data.stride())}"
    return None


def run(data: Tensor, out: Tensor) -> None:
    """One launch on the current stream: ``out[e, k, n] = data[e, n, k]``."""
    device, (groups, rows, columns) = data.get_device(), data.shape
    compiled().transpose_bytes(
        device=device,
        stream=stream(device),
        groups=groups,
        rows=rows,
        columns=columns,
        source=data.data_ptr(),
        out=out.data_ptr(),
    )
