"""Loads compiled kernels and launches them, by the CUDA driver through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from ....fuser.contract.torch_private import current_cuda_device


class DriverError(RuntimeError):
    """The CUDA driver refused to load or to launch a kernel."""


class LoadedKernel:
    """The function ``kernel`` of a cubin. It belongs to no context, so that one serves all devices of an architecture.

    Attributes:
        handle: of the function: a CUkernel, which the extension takes as a number.
    """

    def __init__(self, cubin: bytes) -> None:
        self._cubin = cubin  # the driver may read it again
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0))
        _check(_driver().cuLibraryGetKernel(ctypes.byref(kernel), library, b"kernel"))
        assert kernel.value
        self.handle = kernel.value


def launch(function: int, blocks: int, threads: int, parameters: bytes, device: int, stream: int) -> None:
    """Launches a kernel by its handle, with one structure as its only parameter."""
    arguments = (ctypes.c_char_p * 1)(parameters)
    grid_and_block = blocks, 1, 1, threads, 1, 1
    if device == current_cuda_device():
        _check(_driver().cuLaunchKernel(function, *grid_and_block, 0, stream, arguments, None))
        return
    with torch.cuda.device(device):
        _check(_driver().cuLaunchKernel(function, *grid_and_block, 0, stream, arguments, None))


def parameter_sizes(function: int) -> list[int]:
    """The bytes of each parameter of a kernel that is loaded; nothing where the driver does not tell (before 12.4)."""
    ask = getattr(_driver(), "cuFuncGetParamInfo", None)
    sizes, offset, size = list[int](), ctypes.c_size_t(), ctypes.c_size_t()
    while ask and not ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), *map(ctypes.byref, (offset, size))):
        sizes.append(size.value)
    return sizes


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
