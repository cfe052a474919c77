"""Tensor operands of a program: numbers of columns, per group or for all rows, and matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .program import Program

OperandTensors = Tensor | Sequence[Tensor | None] | None


def tensors_of(operands: Mapping[str, tuple[str, ...]], tensors: OperandTensors, width: int) -> list[Tensor | None]:
    """The tensor of each operand of a program, C columns for each of its inputs; views if the tensors are stacked.

    Numbers of columns are [groups, C] or [1, C], matrices [rows, C]; operands of gate and up have 2 C columns.

    Args:
        operands: the operands of one kind, by name, with their inputs.
        width: C.
    """
    pairs = () if tensors is None else zip(operands.items(), tensors, strict=False)
    return [
        None if tensor is None else tensor[: 1 if name[0] == "a" else None, : len(inputs) * width]
        for (name, inputs), tensor in pairs
    ]


def equal_gradient(program: Program, inputs: Sequence[str]) -> str | None:
    """The name of the gradient equal to this operand's, ``dy`` or ``dx``; None if it has its own.

    An operand that is only added has the gradient of the other term. The gradient of a number of columns sums it over
    rows.
    """
    outputs = dict(program.outputs)
    gradients = [outputs[f"d{name}"] for name in inputs]
    if gradients == ["dy"]:
        return "dy"
    return "dx" if gradients == [outputs[f"d{name}"] for name in program.arguments] else None


def of_rows(vector: Tensor, split_sizes: Tensor | None, rows: int) -> Tensor:
    """Gathers from ``vector`` [groups, C] the values of each row: [rows, C]; zeros past the last group."""
    if split_sizes is None:
        return vector.expand(rows, -1)
    past_the_last = vector.new_zeros((1, vector.shape[1]))
    return torch.cat([vector, past_the_last])[_group_of_rows(split_sizes, rows)]


def sums(by_row: Tensor, split_sizes: Tensor | None) -> Tensor:
    """Sums [rows, C] over the rows of each group, or over all rows: [groups, C]."""
    if split_sizes is None:
        return by_row.sum(0, keepdim=True)
    zeros = by_row.new_zeros((split_sizes.shape[0] + 1, by_row.shape[1]))
    return zeros.index_add_(0, _group_of_rows(split_sizes, by_row.shape[0]), by_row)[:-1]


def _group_of_rows(split_sizes: Tensor, rows: int) -> Tensor:
    """The group number of each row; the number of groups for rows past the last one."""
    return torch.searchsorted(split_sizes.cumsum(0), torch.arange(rows, device=split_sizes.device), right=True)
