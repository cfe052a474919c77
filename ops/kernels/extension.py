"""The compiled extension: whether it is installed, for which devices, and its codes for dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...fuser.contract.torch_private import current_raw_stream
from ...fuser.replay import capture
from . import architecture
from .architecture import Capability, assumed, capability_of

HOPPER = Capability(9, 0)
TYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def compiled() -> Any:
    """The extension. A capture that is active in this thread records its launches."""
    return library()


@cache
def library() -> Any:
    """The extension itself. Importing it does not initialise CUDA."""
    from .. import _C

    return _C


def _find_library() -> Any:
    return library() if is_built() else None


capture.Capture.find_library = staticmethod(_find_library)


def raise_wrong_sizes(device: int) -> None:
    """Raises the error that kernels on a CUDA device have reported for split sizes, and clears it; waits
    for nothing.
    """
    if (extension := _find_library()) is not None:
        extension.raise_wrong_sizes(device)


def address(tensor: Tensor | None) -> int:
    """The address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


@cache
def workspace_bytes(groups: int) -> int:
    """The workspace of a grouped GEMM with an activation, or of one with quantised operands, in bytes."""
    return int(compiled().workspace_bytes(groups))


def stream(device: int) -> int:
    """The address of the current stream of a CUDA device, without an object for it."""
    return int(current_raw_stream(device))


@cache
def is_built() -> bool:
    """Whether the package was installed with it."""
    try:
        library()
    except ImportError:
        return False
    return True


@cache
def device_refusal(device: int) -> str | None:
    """Why none of its kernels can be run on this CUDA device; None: some can."""
    if assumed() is None and not is_built():
        return "is not built (install where nvcc is, with FUSIBLE_BUILD_CUDA=1)"
    capability = capability_of(device)
    return None if capability == HOPPER else f"needs compute capability {HOPPER}, got {capability}"


def hardware_refusal(tensor: Tensor) -> str | None:
    """Why none of its kernels can be run where this tensor is; None: some can."""
    return device_refusal(tensor.get_device()) if tensor.is_cuda else f"needs a CUDA device, got {tensor.device.type}"


@contextmanager
def assume(capability: Capability) -> Iterator[None]:
    """Assumes in the body that every CUDA device has this capability, and that the extension is built.

    Kernels cannot run in the body, which serves ``explain`` on tensors without data.
    """
    try:
        with architecture.assume(capability):
            device_refusal.cache_clear()
            yield
    finally:
        device_refusal.cache_clear()
