"""Pointwise programs over rows as kernels of their own: one launch forward, one backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ...programs.columns import sums
from ...programs.cpp import function_type
from ...programs.program import Program
from ..architecture import Capability, assumed, capability_of
from ..hopper import rows as hopper_rows
from ..hopper.extension import address, is_built, library, stream
from ..problem import Operands, PointwiseGrads, PointwiseRows
from . import pointwise_driver
from .compilation import ELEMENTS, compiled, compiler
from .compiler import CompileError
from .driver import LoadedKernel
from .pointwise_driver import MOST_CONSTANTS, MOST_OPERANDS, PARAMS_BYTES, THREADS

NAME = "hopper"  # chosen and refused as our other kernels are
_OLDEST = Capability(8, 0)  # whose instructions convert bfloat16


class KernelForm(NamedTuple):
    """What a kernel is compiled for: direction, program, the types of y, of numbers of rows and of vectors."""

    direction: str
    program: Program
    columns: torch.dtype
    numbers: tuple[torch.dtype, ...]
    vectors: tuple[torch.dtype, ...]

    def source(self) -> str:
        """The CUDA source."""
        function = function_type(self.program, fast=self.columns != torch.float32)
        numbers, vectors = (", ".join([ELEMENTS[t] for t in types]) for types in (self.numbers, self.vectors))
        return f"""#include "device/pointwise_rows.cuh"
namespace fusible {{
{function}}}  // namespace fusible
static_assert(sizeof(fusible::PointwiseParams) == {PARAMS_BYTES} && fusible::kPointwiseThreads == {THREADS});
extern "C" __global__ void __launch_bounds__({THREADS}) kernel(const __grid_constant__ fusible::PointwiseParams p) {{
  using namespace fusible;
  pointwise_{self.direction}<{ELEMENTS[self.columns]}, Function, Types<{numbers}>, Types<{vectors}>>(p);
}}
"""


def refusal(program: Program, columns: Tensor, rows: PointwiseRows) -> str | None:
    """Why these kernels do not take such rows, None: they do."""
    if columns.dtype not in ELEMENTS:
        return f"computes no {_name(columns.dtype)}"
    for subject, operands, inputs in (("row", rows.numbers, program.rows), ("column", rows.vectors, program.columns)):
        if len(inputs) > MOST_OPERANDS:
            return f"takes at most {MOST_OPERANDS} numbers of a {subject}, got {len(inputs)}"
        for tensor in operands if operands is not None else ():
            if tensor is not None and tensor.dtype not in ELEMENTS:
                return f"reads no numbers of a {subject} in {_name(tensor.dtype)}"
    if len(program.constants) > MOST_CONSTANTS:
        return f"takes at most {MOST_CONSTANTS} constants, got {len(program.constants)}"
    return device_refusal(columns.get_device())


def forward(program: Program, rows: PointwiseRows, out: Tensor) -> None:
    """Fills ``out`` [rows, C]."""
    _launch("forward", program, rows, None, out, PointwiseGrads(None, None, None), [])


def backward(program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads) -> None:
    """Fills what ``out`` has tensors for."""
    vectors, written, terms = _listed(out.vectors), list[Tensor | None](), list[Tensor | None]()
    for vector, name in zip(vectors, program.columns, strict=False):
        term = None if vector is None else _term(program, name, dy, out.x)
        is_written = vector is not None and term is None
        written.append(dy.new_empty(dy.shape, dtype=torch.float32) if is_written else None)
        terms.append(written[-1] if term is None else term)
    _launch("backward", program, rows, dy, None, out, written)
    for term, vector in zip(terms, vectors, strict=True):
        if term is not None and vector is not None:
            _sum_by_group(term, rows.split_sizes, vector)


def _term(program: Program, column: str, dy: Tensor, dx: Tensor | None) -> Tensor | None:
    """That of dy and dx whose sum is the gradient of a number of a column, such as a bias; None if it is neither's."""
    outputs = dict(program.outputs)
    gradient = outputs[f"d{column}"]
    if gradient == "dy":
        return dy
    return dx if len(program.arguments) == 1 and gradient == outputs["dx"] else None


def _sum_by_group(by_row: Tensor, split_sizes: Tensor | None, out: Tensor) -> None:
    """``out`` [groups, C] = the sums of [rows, C] over the rows of each group."""
    if hopper_rows.groups_refusal(by_row, split_sizes, out) is not None:
        out.copy_(sums(by_row.unsqueeze(0).to(torch.promote_types(by_row.dtype, torch.float32)), split_sizes)[0])
    else:
        hopper_rows.column_sums(by_row, split_sizes, out, None)


def _launch(
    direction: str,
    program: Program,
    rows: PointwiseRows,
    dy: Tensor | None,
    y: Tensor | None,
    grads: PointwiseGrads,
    dcolumns: Sequence[Tensor | None],
) -> None:
    columns = y if dy is None else dy
    assert columns is not None
    if not columns.numel():
        return
    device, (count, width) = columns.get_device(), columns.shape
    numbers, dnumbers, vectors = _listed(rows.numbers), _listed(grads.numbers), _listed(rows.vectors)
    types = _types(len(program.rows), numbers, dnumbers), _types(len(program.columns), vectors, [])
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
        numbers=[address(tensor) for tensor in numbers],
        dnumbers=[address(tensor) for tensor in dnumbers],
        vectors=[address(tensor) for tensor in vectors],
        dcolumns=[address(tensor) for tensor in dcolumns],
        groups=1 if sizes is None else sizes.shape[0],
        sizes=address(sizes),
        int64_sizes=sizes is not None and sizes.dtype == torch.int64,
        constants=rows.constants,
    )


def _listed(operands: Operands) -> list[Tensor | None]:
    return [] if operands is None else list(operands)


def _types(count: int, operands: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> tuple[torch.dtype, ...]:
    """The types of as many operands, which their gradients have as well."""
    types = [torch.float32] * count
    for tensors in (grads, operands):
        types = [t if tensor is None else tensor.dtype for t, tensor in zip_longest(types, tensors)]
    return tuple(types)


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
