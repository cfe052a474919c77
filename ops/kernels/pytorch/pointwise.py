"""Pointwise programs over rows, line by line in PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...programs.halves import join, split
from ...programs.program import Program, part_of
from ..problem import PointwiseGrads, PointwiseRows

NAME = "torch"


def forward(program: Program, rows: PointwiseRows, out: Tensor) -> None:
    """Fills ``out`` [rows, C]."""
    inputs = _inputs(program, rows)
    shape = inputs["x"].shape
    join((part_of(program, ("y",)).run(inputs)["y"].expand(shape),), out)


def backward(program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads) -> None:
    """Fills what ``out`` has tensors for."""
    inputs = _inputs(program, rows)
    inputs["dy"] = split(dy.to(_compute_dtype(rows, dy)), 1, rows.block)[0]
    of_x = () if out.x is None else tuple([f"d{name}" for name in program.arguments])
    of_numbers = () if out.numbers is None else tuple([f"d{name}" for name in program.rows])
    computed = part_of(program, of_x + of_numbers).run(inputs)
    shape = inputs["dy"].shape
    if out.x is not None:
        join(tuple([computed[name].expand(shape) for name in of_x]), out.x)
    if out.numbers is not None:
        torch.stack([computed[name].expand(shape).sum((-2, -1)) for name in of_numbers], out=out.numbers)


def _inputs(program: Program, rows: PointwiseRows) -> dict[str, Tensor]:
    """What the program reads, in the dtype that it computes in: columns [rows, blocks, block], numbers [rows, 1, 1]."""
    inputs: dict[str, Tensor] = {}
    if rows.x is not None:
        x = rows.x.to(_compute_dtype(rows, rows.x))
        inputs.update(zip(program.arguments, split(x, len(program.arguments), rows.block), strict=True))
    if rows.numbers is not None:
        inputs.update(zip(program.rows, rows.numbers[:, :, None, None], strict=True))
    return inputs


def _compute_dtype(rows: PointwiseRows, columns: Tensor) -> torch.dtype:
    return torch.promote_types(columns.dtype, torch.float32 if rows.numbers is None else rows.numbers.dtype)
