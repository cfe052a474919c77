"""Operands of several numbers: those of columns, which are of each group of rows or of all rows, and matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .program import Program

OperandTensors = Tensor | Sequence[Tensor | None] | None


def columns_of(program: Program, vectors: OperandTensors, width: int) -> list[Tensor | None]:
    """The numbers of columns of each operand, [groups, C] or [1, C], 2 C of gate and up; of a stack, views.

    Args:
        width: C.
    """
    operands = () if vectors is None else zip(program.column_operands.items(), vectors, strict=False)
    return [
        None if vector is None else vector[: 1 if name[0] == "a" else None, : len(inputs) * width]
        for (name, inputs), vector in operands
    ]


def matrices_of(program: Program, matrices: OperandTensors, width: int) -> list[Tensor | None]:
    """The matrix of each operand, [rows, C], 2 C of gate and up; of a stack, views."""
    operands = () if matrices is None else zip(program.matrix_operands.values(), matrices, strict=False)
    return [None if matrix is None else matrix[:, : len(inputs) * width] for inputs, matrix in operands]


def of_rows(vector: Tensor, split_sizes: Tensor | None, rows: int) -> Tensor:
    """[rows, C]: what each row reads of ``vector`` [groups, C]; zeros past the last group."""
    if split_sizes is None:
        return vector.expand(rows, -1)
    past_the_last = vector.new_zeros((1, vector.shape[1]))
    return torch.cat([vector, past_the_last])[_group_of_rows(split_sizes, rows)]


def sums(by_row: Tensor, split_sizes: Tensor | None) -> Tensor:
    """[groups, C]: the sums of [rows, C] over the rows of each group, or over all."""
    if split_sizes is None:
        return by_row.sum(0, keepdim=True)
    zeros = by_row.new_zeros((split_sizes.shape[0] + 1, by_row.shape[1]))
    return zeros.index_add_(0, _group_of_rows(split_sizes, by_row.shape[0]), by_row)[:-1]


def _group_of_rows(split_sizes: Tensor, rows: int) -> Tensor:
    """The number of each row's group; that of groups for a row past the last one."""
    return torch.searchsorted(split_sizes.cumsum(0), torch.arange(rows, device=split_sizes.device), right=True)
