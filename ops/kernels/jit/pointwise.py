"""Pointwise programs over rows as kernels of their own: one launch forward, one backward."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from ...pointwise.cpp import function_type
from ...pointwise.program import Program
from .cache import kernel_cache, key_of
from .driver import LoadedKernel
from .nvrtc import CompileError, compiler
from .shims import SHIMS

_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
_VECTOR_BYTES = 16
_OLDEST = (8, 0)  # whose instructions convert bfloat16
_ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of DType, in csrc/fusible/dtype.h
_OPTIONS = (
    "--std=c++20",
    "-default-device",
    "--no-cache",  # from which the log would be empty
    "--ptxas-options=-v",
    "-DINFINITY=__int_as_float(0x7f800000)",
    "-DNAN=__int_as_float(0x7fffffff)",
)
_HEADERS = (
    *("device/approx.cuh", "device/element.cuh", "device/math.cuh", "device/pointwise.cuh"),
    *("device/pointwise_rows.cuh", "device/ptx.cuh", "device/vector.cuh", "fusible/dtype.h"),
)


class Rows(NamedTuple):
    """Dense rows that a program runs over. What is None is not there, or not wanted.

    Attributes:
        x: [rows, C], or [rows, 2 C] where gate and up are in it.
        block: columns of gate before as many of up.
        numbers: [rows] each, by the program's names r0, r1, ….
        dnumbers: where the gradients of these go, float32.
    """

    x: Tensor | None
    block: int
    numbers: Mapping[str, Tensor]
    y: Tensor | None = None
    dy: Tensor | None = None
    dx: Tensor | None = None
    dnumbers: Mapping[str, Tensor] = {}


def refusal(x: Tensor, numbers: Sequence[Tensor]) -> str | None:
    """Why PyTorch runs a program over these instead; None: a kernel does."""
    if not x.is_cuda:
        return f"a tensor on {x.device.type}"
    for tensor in (x, *numbers):
        if tensor.dtype not in _ELEMENTS:
            return str(tensor.dtype).removeprefix("torch.")
    return _refusal_of_device(x.device)


def forward(program: Program, rows: Rows) -> None:
    """Fills ``y``."""
    assert rows.y is not None
    _run("forward", program, rows, rows.y)


def backward(program: Program, rows: Rows) -> None:
    """Fills ``dx`` and ``dnumbers``, as far as they are wanted."""
    assert rows.dy is not None
    _run("backward", program, rows, rows.dy)


def source(direction: str, program: Program, dtype: torch.dtype, vector: int) -> str:
    """The CUDA source of a kernel."""
    function = function_type(program, fast=dtype != torch.float32)
    parameters = "const __grid_constant__ fusible::PointwiseParams<fusible::Function::kRows> p"
    return f"""#include "device/pointwise_rows.cuh"
namespace fusible {{
{function}}}  // namespace fusible
extern "C" __global__ void __launch_bounds__({_THREADS}) kernel({parameters}) {{
  fusible::pointwise_{direction}<{_ELEMENTS[dtype]}, fusible::Function, {vector}>(p);
}}
"""


def compiled(text: str, architecture: str) -> bytes:
    """The cubin of a source, from the cache or from NVRTC.

    Raises:
        CompileError: see :func:`nvrtc.compiler`, :meth:`nvrtc.Compiler.compile`.
    """
    options = (f"--gpu-architecture={architecture}", *_OPTIONS)
    key = key_of(text, _headers_digest(), options, compiler().version)
    return kernel_cache().find(key, lambda: compiler().compile(text, _headers(), options))


def _run(direction: str, program: Program, rows: Rows, like: Tensor) -> None:
    """``like`` is a tensor of the columns of y."""
    count, columns = like.shape
    if not count or not columns:
        return
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(like.device))
    kernel = _loaded(direction, program, like.dtype, _vector(rows, like), architecture)
    blocks = -(-count // (_THREADS // 32))
    most = _BLOCKS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(like.device).multi_processor_count
    kernel.launch(min(blocks, most), _parameters(program, rows, count, columns), like.device)


@lru_cache(maxsize=1024)
def _loaded(direction: str, program: Program, dtype: torch.dtype, vector: int, architecture: str) -> LoadedKernel:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a pointwise function is compiled at its first call; call it once before the capture")
    return LoadedKernel(compiled(source(direction, program, dtype, vector), architecture), _THREADS)


def _parameters(program: Program, rows: Rows, count: int, columns: int) -> bytes:
    """The structure PointwiseParams, in csrc/device/pointwise_rows.cuh."""
    names = [name for name in program.inputs if name.startswith("r")]
    numbers = [rows.numbers.get(name) for name in names] or [None]  # an array of C++ has an element
    packed = struct.pack("@qII4P", count, columns, rows.block, *map(_address, (rows.x, rows.dy, rows.y, rows.dx)))
    for number in numbers:
        packed += struct.pack("@Pi4x", _address(number), 0 if number is None else _CODES[number.dtype])
    return packed + struct.pack(f"@{len(numbers)}P", *[_address(rows.dnumbers.get(name)) for name in names] or [0])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _vector(rows: Rows, like: Tensor) -> int:
    """The elements that a lane reads at once: 16 bytes where every vector is aligned and within one block."""
    elements = _VECTOR_BYTES // like.element_size()
    tensors = [tensor for tensor in (rows.x, rows.y, rows.dy, rows.dx) if tensor is not None]
    is_aligned = not any(tensor.data_ptr() % _VECTOR_BYTES for tensor in tensors)
    return elements if is_aligned and not (like.shape[1] % elements or rows.block % elements) else 1


@cache
def _refusal_of_device(device: torch.device) -> str | None:
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {_OLDEST[0]}.{_OLDEST[1]}"
    try:
        compiler()
    except CompileError as error:
        return str(error)
    return None


@cache
def _headers() -> dict[str, str]:
    """Those of csrc that the kernels include, and what stands for the headers of others."""
    folder = files("fusible") / "csrc"
    return {**SHIMS, **{name: (folder / name).read_text() for name in _HEADERS}}


@cache
def _headers_digest() -> str:
    return sha256(repr(sorted(_headers().items())).encode()).hexdigest()
