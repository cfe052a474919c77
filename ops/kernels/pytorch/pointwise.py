"""Pointwise programs over rows, line by line in PyTorch, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ...programs.columns import OperandTensors, of_rows, sums, tensors_of
from ...programs.halves import join, split
from ...programs.program import Program, part_of, with_constants
from ..operators.outputs import compute_dtype
from ..problems.gemm import PointwiseGrads, PointwiseRows

NAME = "torch"


def forward(program: Program, rows: PointwiseRows, out: Tensor) -> None:
    """Fills ``out`` [rows, C]."""
    inputs = _inputs(program, rows, out)
    shape = inputs["x"].shape
    join((_part(program, ("y",), rows).run(inputs)["y"].expand(shape),), out)


def backward(program: Program, rows: PointwiseRows, dy: Tensor, out: PointwiseGrads) -> None:
    """Fills what ``out`` has tensors for."""
    inputs, width = _inputs(program, rows, dy), dy.shape[1]
    inputs["dy"] = split(dy.to(compute_dtype(dy, rows.numbers)), 1, rows.block)[0]
    of_x = {program.arguments: out.x}
    of_rows = dict(zip([(name,) for name in program.rows], () if out.numbers is None else out.numbers, strict=False))
    of_columns = dict(_by_inputs(program.column_operands, out.vectors, width))
    of_matrices = dict(_by_inputs(program.matrix_operands, out.matrices, width))
    wanted = {names: grad for names, grad in (of_x | of_rows | of_columns | of_matrices).items() if grad is not None}
    part = _part(program, tuple([f"d{name}" for names in wanted for name in names]), rows)
    unread = dict.fromkeys(part.reads - inputs.keys(), dy.new_zeros(()))  # by what anybody wants
    computed = part.run({**inputs, **{name: zero.to(inputs["dy"].dtype) for name, zero in unread.items()}})
    shape = inputs["dy"].shape
    for names, grad in wanted.items():
        by_element = tuple([computed[f"d{name}"].expand(shape) for name in names])
        if names in of_rows:
            grad.copy_(by_element[0].sum((-2, -1)))
        elif names in of_columns:
            joined = join(by_element, by_element[0].new_empty((dy.shape[0], grad.shape[1])))
            grad.copy_(sums(joined, rows.groups_of_sum(names[0])))
        else:
            join(by_element, grad)


def _by_inputs(
    operands: Mapping[str, tuple[str, ...]], tensors: OperandTensors, width: int
) -> Iterable[tuple[tuple[str, ...], Tensor | None]]:
    """The tensor of each operand, with its inputs."""
    return zip(operands.values(), tensors_of(operands, tensors, width), strict=False)


def _part(program: Program, outputs: tuple[str, ...], rows: PointwiseRows) -> Program:
    return with_constants(part_of(program, outputs), rows.constants)


def _inputs(program: Program, rows: PointwiseRows, columns: Tensor) -> dict[str, Tensor]:
    """The inputs of the program in its compute dtype: [rows, blocks, block]; numbers [rows, 1, 1]."""
    inputs, dtype, (count, width) = dict[str, Tensor](), compute_dtype(columns, rows.numbers), columns.shape
    if rows.x is not None:
        inputs.update(zip(program.arguments, split(rows.x.to(dtype), len(program.arguments), rows.block), strict=True))
    for name, numbers in zip(program.rows, rows.numbers if rows.numbers is not None else (), strict=False):
        if numbers is not None:
            inputs[name] = numbers.to(dtype)[:, None, None]
    for names, vector in _by_inputs(program.column_operands, rows.vectors, width):
        if vector is not None:
            by_row = of_rows(vector.to(dtype), rows.split_sizes if names[0][0] == "b" else None, count)
            inputs.update(zip(names, split(by_row, len(names), rows.block), strict=True))
    for names, matrix in _by_inputs(program.matrix_operands, rows.matrices, width):
        if matrix is not None:
            inputs.update(zip(names, split(matrix.to(dtype), len(names), rows.block), strict=True))
    return inputs
