"""Pointwise programs over rows as kernels of their own: one launch forward, one backward."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...programs.columns import sums
from ...programs.cpp import function_type
from ...programs.program import Program
from ..architecture import Capability, assumed, capability_of
from ..hopper import rows as hopper_rows
from ..hopper.extension import address, is_built, library, stream
from ..problem import PointwiseGrads, PointwiseRows
from . import pointwise_driver
from .compilation import ELEMENTS, compiled, compiler
from .compiler import CompileError
from .driver import LoadedKernel
from .pointwise_driver import MOST_CONSTANTS, PARAMS_BYTES, THREADS

NAME = "hopper"  # chosen and refused as our other kernels are
_OLDEST = Capability(8, 0)  # whose instructions convert bfloat16


class KernelForm(NamedTuple):
    """What a kernel is compiled for: direction, program, the types of y, of numbers of rows and of vectors."""

    direction: str
    program: Program
    columns: torch.dtype
    numbers: torch.dtype
    vectors: torch.dtype

    def source(self) -> str:
        """The CUDA source."""
        function = function_type(self.program, fast=self.columns != torch.float32)
        columns, numbers, vectors = ELEMENTS[self.columns], ELEMENTS[self.numbers], ELEMENTS[self.vectors]
        return f"""#include "device/pointwise_rows.cuh"
namespace fusible {{
{function}}}  // namespace fusible
static_assert(sizeof(fusible::PointwiseParams) == {PARAMS_BYTES} && fusible::kPointwiseThreads == {THREADS});
extern "C" __global__ void __launch_bounds__({THREADS}) kernel(const __grid_constant__ fusible::PointwiseParams p) {{
  fusible::pointwise_{self.direction}<{columns}, fusible::Function, {numbers}, {vectors}>(p);
}}
"""


def refusal(program: Program, columns: Tensor, rows: PointwiseRows) -> str | None:
    """Why these kernels do not take such rows, None: they do."""
    if columns.dtype not in ELEMENTS:
        return f"computes no {_name(columns.dtype)}"
    if rows.numbers is not None and rows.numbers.dtype not in ELEMENTS:
        return f"reads no numbers of a row in {_name(rows.numbers.dtype)}"
    if len(program.constants) > MOST_CONSTANTS:
        return f"takes at most {MOST_CONSTANTS} constants, got {len(program.constants)}"
    if rows.vectors is not None and rows.vectors.dtype not in ELEMENTS:
        return f"reads no numbers of a column in {_name(rows.vectors.dtype)}"
    return device_refusal(columns.get_device())


def forward(program: Program, rows: PointwiseRows, out: Tensor) -> None:
    """Fills ``out`` [rows, C]."""
    _launch("forward", program, rows, None, out, PointwiseGrads(None, None, None), None)


def backward(program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads) -> None:
    """Fills what ``out`` has tensors for."""
    of_columns = None
    if out.vectors is not None:
        of_columns = dy.new_empty((len(program.columns), *dy.shape), dtype=torch.float32)
    _launch("backward", program, rows, dy, None, out, of_columns)
    if of_columns is not None and out.vectors is not None:
        _sum_by_group(of_columns, rows.split_sizes, out.vectors)


def _sum_by_group(of_columns: Tensor, split_sizes: Tensor | None, out: Tensor) -> None:
    """``out`` [K, groups, C] = the sums of [K, rows, C] over the rows of each group."""
    if split_sizes is None or hopper_rows.groups_refusal(of_columns[0], split_sizes, out) is not None:
        out.copy_(sums(of_columns, split_sizes))
        return
    for by_row, by_group in zip(of_columns, out, strict=True):
        hopper_rows.column_sums(by_row, split_sizes, by_group, None)


def _launch(
    direction: str,
    program: Program,
    rows: PointwiseRows,
    dy: Tensor | None,
    y: Tensor | None,
    grads: PointwiseGrads,
    dcolumns: Tensor | None,
) -> None:
    columns, numbers = y if dy is None else dy, grads.numbers if rows.numbers is None else rows.numbers
    assert columns is not None
    if not columns.numel():
        return
    device, (count, width) = columns.get_device(), columns.shape
    types = [torch.float32 if tensor is None else tensor.dtype for tensor in (numbers, rows.vectors)]
    form, sizes = KernelForm(direction, program, columns.dtype, *types), rows.split_sizes
    launches = library() if is_built() else pointwise_driver
    launches.pointwise(
        function=kernel_function(form, device),
        device=device,
        stream=stream(device),
        rows=count,
        columns=width,
        block=rows.block or width,
        x=address(rows.x),
        dy=address(dy),
        y=address(y),
        dx=address(grads.x),
        numbers=address(rows.numbers),
        dnumbers=address(grads.numbers),
        vectors=address(rows.vectors),
        dcolumns=address(dcolumns),
        groups=1 if sizes is None else sizes.shape[0],
        sizes=address(sizes),
        int64_sizes=sizes is not None and sizes.dtype == torch.int64,
        constants=rows.constants,
    )


@cache
def kernel_function(form: KernelForm, device: int) -> int:
    """The handle of a kernel. It is kept: replays hold it.

    Raises:
        RuntimeError: a CUDA graph is captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a pointwise function is compiled at its first call; call it once before the capture")
    major, minor = _asked(device)
    return _loaded(form.source(), f"sm_{major}{minor}").handle


@cache
def _loaded(text: str, architecture: str) -> LoadedKernel:
    return LoadedKernel(compiled([text], architecture))


def device_refusal(device: int) -> str | None:
    """Why no kernel runs on this CUDA device; None: all do."""
    return _refusal_of(assumed() or _asked(device))


@cache
def _asked(device: int) -> Capability:
    return capability_of(device)


@cache
def _refusal_of(capability: Capability) -> str | None:
    if capability < _OLDEST:
        return f"needs compute capability {_OLDEST} or newer, got {capability}"
    try:
        compiler()
    except CompileError as error:
        return str(error)
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
