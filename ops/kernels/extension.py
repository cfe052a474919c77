"""The compiled extension: whether it is there, for which devices, and its codes for dtypes."""

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
    """The extension. A capture that is active in this thread notes what it launches."""
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
    """Raises what kernels on a CUDA device have reported of split sizes, and forgets it; waits for nothing."""
    if (extension := _find_library()) is not None:
        extension.raise_wrong_sizes(device)


def address(tensor: Tensor | None) -> int:
    """Of a tensor; 0 for one that is not there."""
    return 0 if tensor is None else tensor.data_ptr()


@cache
def workspace_bytes(groups: int) -> int:
    """What an activation's grouped GEMM, or one of quantised operands, needs for itself."""
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


@contextmanager
def assume(capability: Capability) -> Iterator[None]:
    """In the body, every CUDA device is taken to have this capability, and the extension to be built.

    Nothing can be run there: it is for ``explain`` of tensors that hold no data.
    """
    try:
        with architecture.assume(capability):
            device_refusal.cache_clear()
            yield
    finally:
        device_refusal.cache_clear()
