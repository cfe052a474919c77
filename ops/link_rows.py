"""Runs the program of a link over rows, and through it back: tensors by name in, gradients by name out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..fuser import Gradient, Grads
from . import kernels
from .link import Column, Link
from .programs.columns import stacked
from .programs.halves import join, split
from .programs.program import part_of


class Operands(NamedTuple):
    """What a link reads beside x: numbers of rows and of columns by name, and the split sizes of columns of groups.

    Some may be missing, which nothing then reads.
    """

    link: Link
    rows: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
    split_sizes: Tensor | None

    def numbers(self) -> tuple[Tensor | None, ...]:
        """The numbers of the rows, [rows] each, dense."""
        return tuple([_dense(self.rows.get(name)) for name in self.link.rows])

    def vectors(self) -> tuple[Tensor | None, ...]:
        """The numbers of the columns, [groups, C] each, dense."""
        return tuple([self._vector(column) for column in self.link.columns])

    def _vector(self, column: Column) -> Tensor | None:
        if column.name not in self.columns:
            return None
        parameter = self.columns[column.name]
        whole = parameter.reshape(self.link.groups or 1, parameter.shape[-1])
        if column.argument is not None:
            gate, up = split(whole, 2, self.link.block)
            whole = (gate if column.argument == "x" else up).reshape(whole.shape[0], -1)
        return whole.contiguous()


class Saved(NamedTuple):
    """What the backward needs: of x, numbers of rows and columns those that the wanted gradients are computed from."""

    x: Tensor | None
    rows: dict[str, Tensor]
    row_dtypes: dict[str, torch.dtype]
    columns: dict[str, Tensor]
    split_sizes: Tensor | None


def refusal(operands: Operands, x: Tensor) -> str | None:
    """Why our own kernels do not compute the link; None: they do."""
    numbers, vectors = tuple(operands.rows.values()), tuple(operands.columns.values())
    return kernels.pointwise_refusal(x, operands.link.program, numbers, vectors)


def forward(operands: Operands, x: Tensor, needs_grad: frozenset[str]) -> tuple[Tensor, Saved]:
    """The value of the program, rounded once."""
    link = operands.link
    read = operands.numbers(), operands.vectors(), operands.split_sizes
    y = kernels.pointwise(flat(x), link.program, link.block, *read, link.constants)
    return y.reshape(*x.shape[:-1], y.shape[-1]), _saved(operands, x, needs_grad)


def backward(
    link: Link, saved: Saved, dy: Tensor, parameters: Mapping[str, Tensor], needs_grad: frozenset[str]
) -> Grads:
    """The wanted gradients; ``parameters`` are read for their forms."""
    operands = Operands(link, saved.rows, saved.columns, saved.split_sizes)
    number_dtypes = tuple([_number_dtype(saved, n, dy) if n in needs_grad else None for n in link.rows])
    columns = [column.name for column in link.columns]
    vector_dtypes = tuple([parameters[n].dtype if n in needs_grad else None for n in columns])
    dx, by_row, by_column = kernels.pointwise_backward(
        flat(dy),
        None if saved.x is None else flat(saved.x),
        link.program,
        link.block,
        operands.numbers(),
        operands.vectors(),
        saved.split_sizes,
        want_x="x" in needs_grad,
        want_numbers=any(number_dtypes),
        want_vectors=any(vector_dtypes),
        constants=link.constants,
        number_dtypes=number_dtypes,
        vector_dtypes=vector_dtypes,
    )
    grads: dict[str, Gradient] = {} if dx is None else {"x": dx.reshape(*dy.shape[:-1], dx.shape[-1])}
    for name, number in zip(link.rows, by_row if by_row is not None else (), strict=False):
        if name in needs_grad and number is not None:
            grads[name] = number.view(dy.shape[:-1]).to(saved.row_dtypes[name])
    if by_column is not None:
        grads |= column_grads(link, list(by_column), parameters, needs_grad)
    return grads


def stacked_vectors(link: Link, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """[K, groups, C], dense: the numbers of the columns as one tensor; None if the link reads none."""
    vectors = [vector for vector in Operands(link, {}, parameters, None).vectors() if vector is not None]
    return stacked(vectors) if vectors else None


def flat(x: Tensor) -> Tensor:
    """[rows, columns], dense."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()


def _dense(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.reshape(-1).contiguous()


def _number_dtype(saved: Saved, name: str, dy: Tensor) -> torch.dtype:
    """In which the gradient of a number of a row is computed: its own, unless nothing else is as wide."""
    dtype = saved.row_dtypes[name]
    return dtype if dtype.itemsize <= 4 or name in saved.rows else torch.promote_types(dy.dtype, torch.float32)


def column_grads(
    link: Link, by_column: Sequence[Tensor | None], parameters: Mapping[str, Tensor], needs_grad: Collection[str]
) -> dict[str, Gradient]:
    """The wanted gradients of parameters by name, from those of the numbers of the columns."""
    grads = dict[str, Gradient]()
    for i, (name, argument) in enumerate(link.columns):
        whole, parameter = by_column[i], parameters[name]
        if name not in needs_grad or whole is None or argument == "u":
            continue
        up = by_column[i + 1] if argument == "x" else None
        whole = whole if up is None else _joined(whole, up, link.block)
        grads[name] = whole.view(parameter.shape).to(parameter.dtype)
    return grads


def _joined(gate: Tensor, up: Tensor, block: int | None) -> Tensor:
    arguments = tuple([split(each, 1, block)[0] for each in (gate, up)])
    return join(arguments, gate.new_empty((*gate.shape[:-1], 2 * gate.shape[-1])))


def _saved(operands: Operands, x: Tensor, needs_grad: frozenset[str]) -> Saved:
    link, rows, columns, split_sizes = operands
    outputs, dtypes = _outputs(link, needs_grad), {name: numbers.dtype for name, numbers in rows.items()}
    if not outputs:
        return Saved(None, {}, dtypes, {}, None)
    reads = part_of(link.program, outputs).reads
    kept = {name: rows[name] for name, read in zip(link.rows, link.program.rows, strict=True) if read in reads}
    of_columns = zip([column.name for column in link.columns], link.program.columns, strict=True)
    kept_columns = {name: columns[name] for name, read in of_columns if read in reads}
    return Saved(None if reads.isdisjoint(link.program.arguments) else x, kept, dtypes, kept_columns, split_sizes)


def _outputs(link: Link, needs_grad: frozenset[str]) -> tuple[str, ...]:
    """The program's names for the gradients that are wanted."""
    of_rows = zip(link.rows, link.program.rows, strict=True)
    of_columns = zip([column.name for column in link.columns], link.program.columns, strict=True)
    numbers = [f"d{value}" for name, value in (*of_rows, *of_columns) if name in needs_grad]
    return (*[f"d{name}" for name in link.program.arguments if "x" in needs_grad], *numbers)
