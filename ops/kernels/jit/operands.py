"""Operands of a program for kernels: the address of each input, and its C++ type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...programs.cpp import boolean
from ...programs.program import Program
from ..extension import address
from .compilation import ELEMENTS

_VECTOR = 8  # columns of a vector


class Input(NamedTuple):
    """The memory of an input of a program, or of its gradient; ``tensor`` None: absent."""

    tensor: Tensor | None
    address: int


def inputs_of(
    operands: Mapping[str, tuple[str, ...]], tensors: Sequence[Tensor | None], block: int
) -> tuple[Input, ...]:
    """The inputs of operands, in order. Inputs of gate and up are in one tensor, in alternating blocks."""
    inputs = []
    for i, names in enumerate(operands.values()):
        tensor = tensors[i] if i < len(tensors) else None
        for j in range(len(names)):
            behind = 0 if tensor is None else j * block * tensor.element_size()
            inputs.append(Input(tensor, address(tensor) + behind))
    return tuple(inputs)


def column_types(inputs: Sequence[str], dtypes: Sequence[torch.dtype]) -> str:
    """The types of inputs that are numbers of a column, in the terms of ``device/functions/pointwise.cuh``."""
    types = [
        f"ColumnOperand<{ELEMENTS[dtype]}, {boolean(name[0] == 'a')}, {_is_of_both(name)}>"
        for name, dtype in zip(inputs, dtypes, strict=True)
    ]
    return f"Types<{', '.join(types)}>"


def matrix_types(inputs: Sequence[str], dtypes: Sequence[torch.dtype]) -> str:
    """The types of inputs that are numbers of an element."""
    types = [
        f"MatrixOperand<{ELEMENTS[dtype]}, {_is_of_both(name)}>" for name, dtype in zip(inputs, dtypes, strict=True)
    ]
    return f"Types<{', '.join(types)}>"


def is_concat(program: Program, block: int | None, columns: int) -> bool:
    """Whether gate and up are two halves of a row."""
    return len(program.arguments) == 2 and (block or columns) == columns


def is_narrow(program: Program, block: int | None, columns: int) -> bool:
    """Whether gate and up alternate in blocks narrower than a vector."""
    return len(program.arguments) == 2 and (block or columns) < _VECTOR


def one_function(
    program: Program,
    narrow: bool,
    scales: bool,
    vectors: Sequence[torch.dtype],
    sums_vectors: bool,
    matrices: Sequence[torch.dtype] = (),
) -> str:
    """The family of a program's functions in ``device/epilogue/epilogue_functions.cuh``; see :class:`EpilogueForm`."""
    flags = boolean(narrow), boolean(scales), column_types(program.columns, vectors), boolean(sums_vectors)
    return f"OneFunction<Function, {', '.join(flags)}, {matrix_types(program.matrices, matrices)}>"


def _is_of_both(name: str) -> str:
    return boolean(name[-1] in "gu")
