"""Pointwise programs over rows as kernels of their own: one launch forward, one backward."""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...programs.cpp import function_type
from ...programs.program import Program
from ..problem import PointwiseGrads, PointwiseRows
from .compilation import compiled
from .driver import LoadedKernel
from .nvrtc import CompileError, compiler

NAME = "hopper"  # chosen and refused as our other kernels are
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
_VECTOR_BYTES = 16
_OLDEST = (8, 0)  # whose instructions convert bfloat16
_ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def refusal(x: Tensor, numbers: Tensor | None) -> str | None:
    """Why these kernels do not take such rows, None: they do."""
    if x.dtype not in _ELEMENTS:
        return f"computes no {str(x.dtype).removeprefix('torch.')}"
    if numbers is not None and numbers.dtype != torch.float32:
        return "reads numbers of a row in float32"
    return _refusal_of_device(x.device)


def forward(program: Program, rows: PointwiseRows, out: Tensor) -> None:
    """Fills ``out`` [rows, C]."""
    _run("forward", program, out, Addresses(rows.x, None, out, None, rows.numbers, None), rows.block)


def backward(program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads) -> None:
    """Fills what ``out`` has tensors for."""
    _run("backward", program, dy, Addresses(rows.x, dy, None, out.x, rows.numbers, out.numbers), rows.block)


def source(direction: str, program: Program, dtype: torch.dtype, vector: int) -> str:
    """The CUDA source of a kernel."""
    function = function_type(program, fast=dtype != torch.float32)
    parameters = "const __grid_constant__ fusible::PointwiseParams p"
    return f"""#include "device/pointwise_rows.cuh"
namespace fusible {{
{function}}}  // namespace fusible
extern "C" __global__ void __launch_bounds__({_THREADS}) kernel({parameters}) {{
  fusible::pointwise_{direction}<{_ELEMENTS[dtype]}, fusible::Function, {vector}>(p);
}}
"""


class Addresses(NamedTuple):
    """The tensors of PointwiseParams, in csrc/device/pointwise_rows.cuh; None for what is not there or not wanted."""

    x: Tensor | None
    dy: Tensor | None
    y: Tensor | None
    dx: Tensor | None
    numbers: Tensor | None
    dnumbers: Tensor | None


def _run(direction: str, program: Program, like: Tensor, tensors: Addresses, block: int | None) -> None:
    """``like`` is a tensor of the columns of y."""
    rows, columns = like.shape
    if not rows or not columns:
        return
    width = block or columns
    architecture, most = _device(like.device)
    kernel = _loaded(direction, program, like.dtype, _vector(like, tensors, width), architecture)
    blocks = -(-rows // (_THREADS // 32))
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    kernel.launch(min(blocks, most), struct.pack("@qII6P", rows, columns, width, *addresses), like.device)


@lru_cache(maxsize=1024)
def _loaded(direction: str, program: Program, dtype: torch.dtype, vector: int, architecture: str) -> LoadedKernel:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a pointwise function is compiled at its first call; call it once before the capture")
    return LoadedKernel(compiled(source(direction, program, dtype, vector), architecture), _THREADS)


@cache
def _device(device: torch.device) -> tuple[str, int]:
    """Its architecture, and the most blocks of a launch: as many as run at once."""
    properties = torch.cuda.get_device_properties(device)
    most = _BLOCKS_PER_MULTIPROCESSOR * properties.multi_processor_count
    return f"sm_{properties.major}{properties.minor}", most


def _vector(like: Tensor, tensors: Addresses, width: int) -> int:
    """The elements that a lane reads at once: 16 bytes where every vector is aligned and within one block."""
    elements = _VECTOR_BYTES // like.element_size()
    addresses = [tensor.data_ptr() for tensor in tensors[:4] if tensor is not None]
    is_aligned = not any(address % _VECTOR_BYTES for address in addresses)
    return elements if is_aligned and not (like.shape[1] % elements or width % elements) else 1


@cache
def _refusal_of_device(device: torch.device) -> str | None:
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {_OLDEST[0]}.{_OLDEST[1]}"
    try:
        compiler()
    except CompileError as error:
        return str(error)
    return None
