"""Pointwise programs over rows, line by line in PyTorch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...programs.columns import of_rows, sums
from ...programs.halves import join, split
from ...programs.program import Program, part_of, with_constants
from ..outputs import compute_dtype
from ..problem import Operands, PointwiseGrads, PointwiseRows

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
    of_numbers, of_vectors = _wanted(program.rows, out.numbers), _wanted(program.columns, out.vectors)
    part = _part(program, (*of_x, *of_numbers, *of_vectors), rows)
    unread = dict.fromkeys(part.reads - inputs.keys(), dy.new_zeros(()))  # by what anybody wants
    computed = part.run({**inputs, **{name: zero.to(inputs["dy"].dtype) for name, zero in unread.items()}})
    shape = inputs["dy"].shape
    if out.x is not None:
        join(tuple([computed[name].expand(shape) for name in of_x]), out.x)
    for name, of_row in of_numbers.items():
        of_row.copy_(computed[name].expand(shape).sum((-2, -1)))
    for name, of_groups in of_vectors.items():
        of_groups.copy_(sums(computed[name].expand(shape).reshape(1, *dy.shape), rows.split_sizes)[0])


def _wanted(names: Sequence[str], out: Operands) -> dict[str, Tensor]:
    """Where the gradients of operands go, by the names of the program's outputs."""
    places = () if out is None else out
    return {f"d{name}": tensor for name, tensor in zip(names, places, strict=False) if tensor is not None}


def _part(program: Program, outputs: tuple[str, ...], rows: PointwiseRows) -> Program:
    return with_constants(part_of(program, outputs), rows.constants)


def _inputs(program: Program, rows: PointwiseRows, columns: Tensor) -> dict[str, Tensor]:
    """What the program reads, in the dtype that it computes in: [rows, blocks, block]; numbers [rows, 1, 1]."""
    inputs, dtype = dict[str, Tensor](), compute_dtype(columns, rows.numbers)
    if rows.x is not None:
        inputs.update(zip(program.arguments, split(rows.x.to(dtype), len(program.arguments), rows.block), strict=True))
    for name, numbers in zip(program.rows, rows.numbers if rows.numbers is not None else (), strict=False):
        if numbers is not None:
            inputs[name] = numbers.to(dtype)[:, None, None]
    for name, vector in zip(program.columns, rows.vectors if rows.vectors is not None else (), strict=False):
        if vector is not None:
            (by_row,) = of_rows(vector.to(dtype).unsqueeze(0), rows.split_sizes, columns.shape[0])
            (inputs[name],) = split(by_row, 1, rows.block)
    return inputs
