"""Kernels of Triton as the extension sees them: functions by a handle, here interpreted on tensors of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusible.fuser.contract.torch_private import without_dispatch_modes

CALLED = ctypes.CFUNCTYPE(None, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p))
SCRATCH = [8, 8]  # bytes of the parameters that Triton adds
_BASE = 8  # where a map of the emulation has the address of its tensor
_SWIZZLE, _INNER = 3, 128  # of a box: 128 bytes, and so many of a row


class Compiled:
    """Stands for a compiled kernel; its function runs the interpreted one on the parameters that it is given."""

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._kernel, self._arguments, self._constants = kernel, arguments, constants
        self.module, self.launches = object(), 0
        kinds = tuple(map(kind_of, arguments))
        self.src = SimpleNamespace(signature=dict(zip(kernel.arg_names, kinds, strict=False)))
        maps = [form_of(each) for each in flat(arguments) if hasattr(each, "block_shape")]
        self.metadata = SimpleNamespace(num_warps=4, shared=0, num_ctas=1, tensordesc_meta=maps)
        self.sizes = [size for kind, each in zip(kinds, arguments, strict=True) for size in sizes_of(kind, each)]
        self._called = CALLED(self._run)
        self.function = ctypes.cast(self._called, ctypes.c_void_p).value

    def _init_handles(self) -> None:
        """Everything is there."""

    def _run(self, x: int, y: int, parameters: Any) -> None:
        self.launches += 1
        values = iter(parameters[: len(self.sizes)])
        kinds = self.src.signature.values()
        arguments = [passed(kind, each, values) for kind, each in zip(kinds, self._arguments, strict=False)]
        with without_dispatch_modes():  # the interpreter computes with tensors, too
            self._kernel.run(*arguments, grid=(x, y), warmup=False, **self._constants)


def flat(value: Any) -> Iterator[Any]:
    for each in value if isinstance(value, tuple) else ():
        yield from flat(each)
    if not isinstance(value, tuple):
        yield value


def kind_of(value: Any) -> Any:
    """The type of an argument, as Triton names it."""
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if hasattr(value, "block_shape"):
        return "tensordesc"
    if isinstance(value, torch.Tensor):
        return "*"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def form_of(descriptor: Any) -> dict[str, Any]:
    box = [*descriptor.block_shape]
    box[-1] = min(box[-1], _INNER // descriptor.base.element_size())
    return {"swizzle": _SWIZZLE, "block_size": box, "fp4_padded": False}


def sizes_of(kind: Any, value: Any) -> Iterator[int]:
    """The bytes of the parameters of an argument."""
    if isinstance(kind, tuple):
        for each, of_value in zip(kind, value, strict=True):
            yield from sizes_of(each, of_value)
    elif kind == "tensordesc":
        yield from (128, *[4] * len(value.shape), *[8] * len(value.shape))
    elif kind != "constexpr":
        yield 4 if kind in ("i32", "fp32") else 8


def passed(kind: Any, value: Any, values: Iterator[int]) -> Any:
    """An argument with what parameters have in place of its addresses and numbers."""
    if isinstance(kind, tuple):
        return tuple(passed(each, of_value, values) for each, of_value in zip(kind, value, strict=True))
    if kind == "constexpr":
        return value
    at = next(values)
    if kind == "tensordesc":
        base = tensor_at(_read(ctypes.c_uint64, at + _BASE), value.base.dtype)
        shape = [_read(ctypes.c_int32, next(values)) for _ in value.shape]
        strides = [_read(ctypes.c_int64, next(values)) for _ in value.shape]
        return type(value)(base, shape, strides, value.block_shape)
    if kind == "*":
        return tensor_at(_read(ctypes.c_uint64, at), value.dtype)
    return _read({"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}[kind], at)


def _read(kind: Any, address: int) -> Any:
    return kind.from_address(address).value


def tensor_at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """One number there; kernels ask for no more of a tensor."""
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


@contextmanager
def compiled() -> Iterator[list[Compiled]]:
    """In the body, interpreted kernels are compiled when they are warmed up; gives those."""
    kernels = list[Compiled]()
    foreign = import_module("fusible.ops.kernels.triton.device.foreign")
    function = import_module("triton.runtime.interpreter").InterpretedFunction
    run = function.run

    def compile_or_run(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        if not warmup:
            return run(self, *arguments, grid=grid, warmup=False, **constants)
        kernels.append(Compiled(self, arguments, constants))
        return kernels[-1]

    def sizes_of_function(handle: int) -> list[int]:
        return next(each.sizes for each in kernels if each.function == handle) + SCRATCH

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "run", compile_or_run)
        patch.setattr(foreign, "parameter_sizes", sizes_of_function)
        patch.setattr(foreign, "current_cuda_device", lambda: 0)
        patch.setattr(foreign, "current_raw_stream", lambda device: 0)
        yield kernels
