"""Operands of several numbers: those of columns, which are of each group of rows or of all rows, and matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .program import Program

OperandTensors = Tensor | Sequence[Tensor | None] | None


def tensors_of(operands: Mapping[str, tuple[str, ...]], tensors: OperandTensors, width: int) -> list[Tensor | None]:
    """The tensor of each operand of a program, as wide as its inputs, C for each; of a stack, views.

    Numbers of columns are [groups, C] or [1, C], matrices [rows, C]; those of gate and up have 2 C columns.

    Args:
        operands: those of a kind, by name, with their inputs.
        width: C.
    """
    pairs = () if tensors is None else zip(operands.items(), tensors, strict=False)
    return [
        None if tensor is None else tensor[: 1 if name[0] == "a" else None, : len(inputs) * width]
        for (name, inputs), tensor in pairs
    ]


def equal_gradient(program: Program, inputs: Sequence[str]) -> str | None:
    """The name of the gradient that an operand's is, value for value: ``dy`` or ``dx``; None: it is one of its own.

    That of an operand that is only added is that of what it is added to. A number of columns sums it over rows.
    """
    outputs = dict(program.outputs)
    gradients = [outputs[f"d{name}"] for name in inputs]
    if gradients == ["dy"]:
        return "dy"
    return "dx" if gradients == [outputs[f"d{name}"] for name in program.arguments] else None


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
