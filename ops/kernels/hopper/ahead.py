"""Kernels of user-written functions, compiled before a program needs them. Needs a compiler, but no GPU."""

from __future__ import annotations

from itertools import product

import torch

from ...programs.program import Program
from ...values.activation_spec import ActivationSpec
from ..extension import is_built
from ..jit import epilogue
from ..jit import quantized as quantized_kernels
from ..jit.compilation import compiled
from ..jit.epilogue import EpilogueForm, blocks_of
from ..jit.operands import is_concat, is_narrow
from ..jit.quantized import QuantizerForm, QuantizingForm, ScaledForm
from ..problems.gemm import Layout
from .pointwise import KernelForm

_ROWS_ARCHITECTURE = "sm_90"
_WIDER_THAN_BLOCKS = 1 << 30  # columns: gate and up are two blocks only where they have no block


def compile_ahead(
    program: Program,
    spec: ActivationSpec | None,
    dtype: torch.dtype,
    columns: tuple[torch.dtype, ...] = (),
    quantized: bool = False,
) -> int:
    """Compiles the kernels of a function for a Hopper GPU into the cache on disk; returns how many.

    It compiles kernels over rows and, with ``spec`` and a built extension, those in the grouped GEMM: both directions,
    both orientations of weights, with and without a bias, and with and without scales unless the function reads a
    number of the row.

    Args:
        columns: the types of the numbers of columns that the function reads.
        quantized: whether to compile kernels that quantise their results, too.

    Raises:
        CompileError: there is no compiler, or it fails.
    """
    types = (torch.float32,) * len(program.rows), columns
    rows = [KernelForm(direction, program, dtype, *types) for direction in ("forward", "backward")]
    for form in rows:
        compiled([form.source()], _ROWS_ARCHITECTURE)
    if spec is None or spec.program is None or dtype == torch.float32 or not is_built():
        return len(rows)
    scales = (True,) if program.rows else (False, True)
    forms = [form for each in scales for form in _forms(spec.program, spec.block, dtype, columns, each)]
    count = len(rows) + sum(map(epilogue.compile_ahead, forms))
    if not quantized:
        return count
    kernels = [form for each in scales for form in _quantized_forms(spec.program, spec.block, dtype, columns, each)]
    return count + sum(map(quantized_kernels.compile_ahead, kernels))


def _forms(
    program: Program, block: int | None, dtype: torch.dtype, vectors: tuple[torch.dtype, ...], scales: bool
) -> list[EpilogueForm]:
    forms = [(False, bias, False) for bias in (False, True)]  # whether backward, with a bias, with sums of vectors
    forms += [(True, False, sums) for sums in ((False, True) if vectors else (False,))]
    layouts = (Layout.NT, Layout.NN)
    return [
        EpilogueForm(
            *(program, backward, layout, dtype, *blocks_of(program, backward, block, _WIDER_THAN_BLOCKS)),
            *(bias, False, vectors, sums, scales),
        )
        for (backward, bias, sums), layout in product(forms, layouts)
    ]


def _quantized_forms(
    program: Program, block: int | None, dtype: torch.dtype, vectors: tuple[torch.dtype, ...], scales: bool
) -> list[QuantizingForm]:
    lies = program, block, _WIDER_THAN_BLOCKS
    concat, narrow = is_concat(*lies), is_narrow(*lies)
    forms: list[QuantizingForm] = [
        ScaledForm(program, dtype, concat, narrow, bias, vectors, scales) for bias in (False, True)
    ]
    directions = [(False, False), *((True, sums) for sums in ((False, True) if vectors else (False,)))]
    return forms + [
        QuantizerForm(program, backward, dtype, narrow, vectors, sums, scales) for backward, sums in directions
    ]
