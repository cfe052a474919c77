"""Loads compiled kernels and launches them, by the CUDA driver through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


class DriverError(RuntimeError):
    """The CUDA driver refused to load or to launch a kernel."""


class LoadedKernel:
    """The function ``kernel`` of a cubin. It belongs to no context, so that one serves all devices of an architecture.

    Attributes:
        threads: of a block.
    """

    def __init__(self, cubin: bytes, threads: int) -> None:
        self.threads, self._cubin = threads, cubin  # the driver may read the cubin again
        library, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0))
        _check(_driver().cuLibraryGetKernel(ctypes.byref(self._kernel), library, b"kernel"))

    @property
    def handle(self) -> int:
        """Of the kernel (cudaKernel_t), for launches by others."""
        return int(self._kernel.value or 0)

    def launch(self, blocks: int, parameters: bytes, device: torch.device) -> None:
        """Launches it on the current stream of a device, with one structure as its only parameter."""
        arguments = (ctypes.c_char_p * 1)(parameters)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        grid_and_block = blocks, 1, 1, self.threads, 1, 1
        if device.index == torch._C._cuda_getDevice():
            _check(_driver().cuLaunchKernel(self._kernel, *grid_and_block, 0, stream, arguments, None))
            return
        with torch.cuda.device(device):
            _check(_driver().cuLaunchKernel(self._kernel, *grid_and_block, 0, stream, arguments, None))


@cache
def _driver() -> Any:
    library: Any = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return library


def _check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise DriverError(f"the CUDA driver says {(name.value or b'an unknown error').decode()}")
