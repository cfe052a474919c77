"""The compiled extension: whether it is there, for which devices, and its codes for dtypes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....fuser.replay import capture

TYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def compiled() -> Any:
    """The extension. A capture that is active in this thread notes what it launches."""
    return library()


@cache
def library() -> Any:
    """The extension itself. Importing it does not initialise CUDA."""
    from ... import _C

    return _C


def _find_library() -> Any:
    try:
        return library()
    except ImportError:
        return None


capture.register_library(_find_library)


def address(tensor: Tensor | None) -> int:
    """Of a tensor; 0 for one that is not there."""
    return 0 if tensor is None else tensor.data_ptr()


@cache
def workspace_bytes(groups: int) -> int:
    """What a grouped GEMM, or one that ends in an activation, needs for itself."""
    return int(compiled().workspace_bytes(groups))


def stream(device: int) -> int:
    """The address of the current stream of a CUDA device, without an object for it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


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
    if not is_built():
        return "is not built (install where nvcc is, with FUSIBLE_BUILD_CUDA=1)"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"needs compute capability 9.0, got {capability[0]}.{capability[1]}"
    return None
