"""Pointwise programs over rows as kernels of their own: one launch forward, one backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ...programs.columns import equal_gradient, sums, tensors_of
from ...programs.cpp import boolean, function_type
from ...programs.program import Program
from ..architecture import Capability, assumed, capability_of
from ..extension import address, is_built, library, stream
from ..jit import pointwise_driver
from ..jit.compilation import ELEMENTS, compiled, compiler
from ..jit.driver import LoadedKernel
from ..jit.nvrtc import CompileError
from ..jit.operands import Input, column_types, inputs_of, matrix_types
from ..jit.pointwise_driver import MOST_CONSTANTS, MOST_OPERANDS, PARAMS_BYTES, THREADS
from ..problems.gemm import Operands, PointwiseGrads, PointwiseRows
from . import rows as hopper_rows

_OLDEST = Capability(8, 0)  # whose instructions convert bfloat16


class KernelForm(NamedTuple):
    """The compile-time form of a kernel: direction, program, and the types of y and of the inputs of each kind."""

    direction: str
    program: Program
    columns: torch.dtype
    numbers: tuple[torch.dtype, ...]
    vectors: tuple[torch.dtype, ...]
    matrices: tuple[torch.dtype, ...] = ()

    def source(self) -> str:
        """The CUDA source."""
        function = function_type(self.program, fast=boolean(self.columns != torch.float32))
        numbers = ", ".join([ELEMENTS[t] for t in self.numbers])
        vectors = column_types(self.program.columns, self.vectors)
        matrices = matrix_types(self.program.matrices, self.matrices)
        return f"""#include "device/functions/pointwise_rows.cuh"
namespace fusible {{
{function}}}  // namespace fusible
static_assert(sizeof(fusible::PointwiseParams) == {PARAMS_BYTES} && fusible::kPointwiseThreads == {THREADS});
extern "C" __global__ void __launch_bounds__({THREADS}) kernel(const __grid_constant__ fusible::PointwiseParams p) {{
  using namespace fusible;
  using Inputs = PointwiseInputs<Types<{numbers}>, {vectors}, {matrices}>;
  pointwise_{self.direction}<{ELEMENTS[self.columns]}, Function, Inputs>(p);
}}
"""


def refusal(program: Program, columns: Tensor, rows: PointwiseRows) -> str | None:
    """Why these kernels do not take such rows, None: they do."""
    if columns.dtype not in ELEMENTS:
        return f"computes no {_name(columns.dtype)}"
    of_inputs = {"a row": program.rows, "a column": program.columns, "an element": program.matrices}
    of_kinds = dict(zip(of_inputs, (rows.numbers, rows.vectors, rows.matrices), strict=True))
    for subject, inputs in of_inputs.items():
        if len(inputs) > MOST_OPERANDS:
            return f"takes at most {MOST_OPERANDS} numbers of {subject}, got {len(inputs)}"
        operands = of_kinds[subject]
        for tensor in operands if operands is not None else ():
            if tensor is not None and tensor.dtype not in ELEMENTS:
                return f"reads no numbers of {subject} in {_name(tensor.dtype)}"
    if len(program.constants) > MOST_CONSTANTS:
        return f"takes at most {MOST_CONSTANTS} constants, got {len(program.constants)}"
    return device_refusal(columns.get_device())


def forward(program: Program, rows: PointwiseRows, out: Tensor) -> None:
    """Fills ``out`` [rows, C]."""
    _launch("forward", program, rows, None, out, PointwiseGrads(None, None, None), [])


def backward(program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads) -> None:
    """Fills what ``out`` has tensors for."""
    operands, gradients = program.column_operands, {"dy": dy, "dx": out.x}
    vectors = tensors_of(operands, out.vectors, dy.shape[1])
    written, terms = list[Tensor | None](), list[Tensor | None]()
    for vector, inputs in zip(vectors, operands.values(), strict=False):
        equal = None if vector is None else equal_gradient(program, inputs)
        term = None if equal is None else gradients[equal]
        shape = dy.shape[0], dy.shape[1] * len(inputs)
        is_written = vector is not None and term is None
        written.append(dy.new_empty(shape, dtype=torch.float32) if is_written else None)
        terms.append(written[-1] if term is None else term)
    matrices = tensors_of(program.matrix_operands, out.matrices, dy.shape[1])
    dense = [None if each is None else each if each.is_contiguous() else torch.empty_like(each) for each in matrices]
    if any(each is not None for each in (out.x, *_listed(out.numbers), *dense, *written)):
        _launch("backward", program, rows, dy, None, out._replace(matrices=dense), written)
    for matrix, filled in zip(matrices, dense, strict=True):
        if matrix is not None and filled is not None and filled is not matrix:
            matrix.copy_(filled)
    for term, vector, name in zip(terms, vectors, operands, strict=False):
        if term is not None and vector is not None:
            _sum_by_group(term, rows.groups_of_sum(name), vector)


def _sum_by_group(by_row: Tensor, split_sizes: Tensor | None, out: Tensor) -> None:
    """``out`` [groups, C] = the sums of [rows, C] over the rows of each group."""
    if hopper_rows.groups_refusal(by_row, split_sizes, out) is not None:
        out.copy_(sums(by_row.to(torch.promote_types(by_row.dtype, torch.float32)), split_sizes))
    else:
        hopper_rows.column_sums(by_row, split_sizes, out, None)


def _launch(
    direction: str,
    program: Program,
    rows: PointwiseRows,
    dy: Tensor | None,
    y: Tensor | None,
    grads: PointwiseGrads,
    dcolumns_of_operands: Sequence[Tensor | None],
) -> None:
    columns = y if dy is None else dy
    assert columns is not None
    if not columns.numel():
        return
    device, (count, width) = columns.get_device(), columns.shape
    block, numbers, dnumbers = rows.block or width, _listed(rows.numbers), _listed(grads.numbers)
    sizes = rows.split_sizes if any(name[0] == "b" for name in program.columns) else None
    vectors = _dense_inputs(program.column_operands, rows.vectors, width, block)
    dcolumns = inputs_of(program.column_operands, dcolumns_of_operands, block)
    matrices = _dense_inputs(program.matrix_operands, rows.matrices, width, block)
    dmatrices = inputs_of(program.matrix_operands, _listed(grads.matrices), block)
    form = KernelForm(
        *(direction, program, columns.dtype, _types(len(program.rows), numbers, dnumbers)),
        _types(len(program.columns), [each.tensor for each in vectors], []),
        _types(len(program.matrices), [m.tensor for m in matrices], [m.tensor for m in dmatrices]),
    )
    launches = library() if is_built() else pointwise_driver
    launches.pointwise(
        function=kernel_function(form, device),
        device=device,
        stream=stream(device),
        rows=count,
        columns=width,
        block=block,
        x=address(rows.x),
        dy=address(dy),
        y=address(y),
        dx=address(grads.x),
        numbers=[address(tensor) for tensor in numbers],
        dnumbers=[address(tensor) for tensor in dnumbers],
        vectors=[each.address for each in vectors],
        dcolumns=[each.address for each in dcolumns],
        matrices=[each.address for each in matrices],
        dmatrices=[each.address for each in dmatrices],
        groups=1 if sizes is None else sizes.shape[0],
        sizes=address(sizes),
        int64_sizes=sizes is not None and sizes.dtype == torch.int64,
        constants=rows.constants,
    )


def _dense_inputs(
    operands: Mapping[str, tuple[str, ...]], tensors: Operands, width: int, block: int
) -> tuple[Input, ...]:
    """The inputs of operands with several numbers, dense. Operands in a stack may be narrower than it."""
    dense = [None if each is None else each.contiguous() for each in tensors_of(operands, tensors, width)]
    return inputs_of(operands, dense, block)


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
    """The handle of a kernel, which is kept since replays hold it.

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
