"""Pointwise programs over rows, line by line in PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...programs.columns import of_rows, sums
from ...programs.halves import join, split
from ...programs.program import Program, part_of, with_constants
from ..outputs import compute_dtype
from ..problem import PointwiseGrads, PointwiseRows

NAME = "torch"


def forward(program: Program, rows: PointwiseRows, out: Tensor) -> None:
    """Fills ``out`` [rows, C]."""
    inputs = _inputs(program, rows, out)
    shape = inputs["x"].shape
    join((_part(program, ("y",), rows).run(inputs)["y"].expand(shape),), out)


def backward(program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads) -> None:
    """Fills what ``out`` has tensors for."""
    inputs = _inputs(program, rows, dy)
    inputs["dy"] = split(dy.to(compute_dtype(dy, rows.numbers)), 1, rows.block)[0]
    of_x = () if out.x is None else tuple([f"d{name}" for name in program.arguments])
    of_numbers = () if out.numbers is None else tuple([f"d{name}" for name in program.rows])
    of_vectors = () if out.vectors is None else tuple([f"d{name}" for name in program.columns])
    computed = _part(program, of_x + of_numbers + of_vectors, rows).run(inputs)
    shape = inputs["dy"].shape
    if out.x is not None:
        join(tuple([computed[name].expand(shape) for name in of_x]), out.x)
    if out.numbers is not None:
        out.numbers.copy_(torch.stack([computed[name].expand(shape).sum((-2, -1)) for name in of_numbers]))
    if out.vectors is not None:
        by_row = torch.stack([computed[name].expand(shape).reshape(dy.shape) for name in of_vectors])
        out.vectors.copy_(sums(by_row, rows.split_sizes))


def _part(program: Program, outputs: tuple[str, ...], rows: PointwiseRows) -> Program:
    return with_constants(part_of(program, outputs), rows.constants)


def _inputs(program: Program, rows: PointwiseRows, columns: Tensor) -> dict[str, Tensor]:
    """What the program reads, in the dtype that it computes in: [rows, blocks, block]; numbers [rows, 1, 1]."""
    # what was not kept is read by gradients alone that nobody wants
    inputs = dict.fromkeys(program.inputs, columns.new_zeros((), dtype=compute_dtype(columns, rows.numbers)))
    if rows.x is not None:
        x = rows.x.to(compute_dtype(columns, rows.numbers))
        inputs.update(zip(program.arguments, split(x, len(program.arguments), rows.block), strict=True))
    if rows.numbers is not None:
        numbers = rows.numbers.to(compute_dtype(columns, rows.numbers))
        inputs.update(zip(program.rows, numbers[:, :, None, None], strict=True))
    if rows.vectors is not None:
        vectors = of_rows(rows.vectors.to(compute_dtype(columns, rows.numbers)), rows.split_sizes, columns.shape[0])
        inputs.update(zip(program.columns, split(vectors, 1, rows.block)[0], strict=True))
    return inputs
