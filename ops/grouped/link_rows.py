"""Runs the program of a link over rows, forward and backward: tensors by name in, gradients by name out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads
from .. import kernels
from ..basic.link import Link
from ..kernels import PointwiseGrads, PointwiseOperands
from ..kernels.operators.outputs import GradDtypes, WantedGrads
from ..programs.columns import equal_gradient, tensors_of
from ..programs.program import part_of
from .grouped_linear import with_rows_of


class LinkOperands(NamedTuple):
    """The operands of a link beside x: by name, and the split sizes of columns of groups.

    Operands that no computation reads may be missing.
    """

    link: Link
    by_keyword: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
    split_sizes: Tensor | None

    def numbers(self) -> tuple[Tensor | None, ...]:
        """The numbers of the rows, [rows] each, dense."""
        rows = [self.by_keyword.get(name) for name in self.link.rows]
        return tuple([None if each is None else each.reshape(-1).contiguous() for each in rows])

    def vectors(self) -> tuple[Tensor | None, ...]:
        """The numbers of the columns: [groups, C] each, or [1, C] for those of all rows; 2 C for gate and up."""
        return tuple([_vector(self.columns.get(name)) for name in self.link.columns])

    def matrices(self) -> tuple[Tensor | None, ...]:
        """The numbers of the elements, [rows, C] each, dense; 2 C for gate and up."""
        matrices = [self.by_keyword.get(name) for name in self.link.matrices]
        return tuple([None if each is None else flat(each) for each in matrices])

    def of_program(self) -> PointwiseOperands:
        """As kernels read them."""
        read = self.numbers(), self.vectors(), self.split_sizes
        return PointwiseOperands(self.link.block, *read, self.link.constants, self.matrices())


class Saved(NamedTuple):
    """The tensors the backward reads: x, and the operands that some wanted gradient depends on."""

    x: Tensor | None
    by_keyword: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    columns: dict[str, Tensor]
    split_sizes: Tensor | None


def refusal(operands: LinkOperands, x: Tensor) -> str | None:
    """The reason why our own kernels do not compute the link, or None."""
    return kernels.pointwise_refusal(x, operands.link.program, operands.of_program())


def forward(operands: LinkOperands, x: Tensor, needs_grad: frozenset[str]) -> tuple[Tensor, Saved]:
    """The value of the program, rounded once."""
    y = kernels.pointwise(flat(x), operands.link.program, operands.of_program())
    return with_rows_of(x, y), saved(operands, x, needs_grad)


def backward(
    link: Link, saved: Saved, dy: Tensor, parameters: Mapping[str, Tensor], needs_grad: frozenset[str]
) -> Grads:
    """The wanted gradients; only shape and dtype of ``parameters`` are read.

    An operand that is only added gets the gradient of the result, or of x: the same tensor, not a copy.
    """
    equal = _equal_gradients(link, needs_grad)
    x_is_dy = not link.gated and dict(link.program.outputs)["dx"] == "dy"
    of_numbers = tuple([_number_dtype(saved, n, dy) if n in needs_grad else None for n in link.rows])
    of_vectors = tuple([parameters[n].dtype if n in needs_grad else None for n in link.columns])
    of_matrices = tuple([saved.dtypes[n] if n in equal and equal[n] is None else None for n in link.matrices])
    want_x = not x_is_dy and ("x" in needs_grad or "dx" in equal.values())
    computed = PointwiseGrads(None, None, None)
    if want_x or any(of_numbers + of_vectors + of_matrices):
        computed = _gradients(link, saved, dy, want_x, GradDtypes(of_numbers, of_vectors, of_matrices))
    leading = dy.shape[:-1]
    grads: dict[str, Gradient] = {"x": dy} if x_is_dy else {}
    if computed.x is not None:
        grads["x"] = computed.x.reshape(*leading, computed.x.shape[-1])
    for name, number in zip(link.rows, _each(computed.numbers), strict=False):
        if name in needs_grad and number is not None:
            grads[name] = number.view(leading).to(saved.dtypes[name])
    grads |= column_grads(link, _each(computed.vectors), parameters, needs_grad)
    matrices = tensors_of(link.program.matrix_operands, computed.matrices, dy.shape[-1])
    by_matrix = dict(zip(link.matrices, matrices, strict=False))
    for name, other in equal.items():
        matrix = by_matrix.get(name)
        if other is not None:
            grads[name] = grads["x"] if other == "dx" else dy
        elif matrix is not None:
            grads[name] = matrix.reshape(*leading, matrix.shape[-1]).to(saved.dtypes[name])
    return grads


def _gradients(link: Link, saved: Saved, dy: Tensor, want_x: bool, dtypes: GradDtypes) -> PointwiseGrads:
    """The gradients computed by kernels. ``dtypes``: None where no gradient is wanted."""
    operands = LinkOperands(link, saved.by_keyword, saved.columns, saved.split_sizes)
    return kernels.pointwise_backward(
        flat(dy),
        None if saved.x is None else flat(saved.x),
        link.program,
        operands.of_program(),
        wanted=WantedGrads(want_x, *map(any, dtypes)),
        dtypes=dtypes,
    )


def _each(operands: kernels.Operands) -> Iterable[Tensor | None]:
    return () if operands is None else operands


def _equal_gradients(link: Link, needs_grad: frozenset[str]) -> dict[str, str | None]:
    """By matrix operand: the existing gradient that its own is equal to, see :func:`equal_gradient`."""
    matrices = zip(link.matrices, link.program.matrix_operands.values(), strict=True)
    return {name: equal_gradient(link.program, inputs) for name, inputs in matrices if name in needs_grad}


def vectors_of(link: Link, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...] | None:
    """The numbers of the columns for kernels, [groups, C] or [1, C] each; None if the link reads none."""
    vectors = [_vector(parameters[name]) for name in link.columns]
    return tuple([vector for vector in vectors if vector is not None]) or None


def flat(x: Tensor) -> Tensor:
    """Reshapes to [rows, columns], dense."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def _vector(parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    return (parameter if parameter.dim() == 2 else parameter.unsqueeze(0)).contiguous()


def _number_dtype(saved: Saved, name: str, dy: Tensor) -> torch.dtype:
    """The dtype in which the gradient of a number of a row is computed: its own, unless all other operands are
    narrower.
    """
    dtype = saved.dtypes[name]
    return dtype if dtype.itemsize <= 4 or name in saved.by_keyword else torch.promote_types(dy.dtype, torch.float32)


def column_grads(
    link: Link, by_column: Iterable[Tensor | None], parameters: Mapping[str, Tensor], needs_grad: Collection[str]
) -> dict[str, Gradient]:
    """The wanted gradients of parameters by name, from those of the numbers of columns, which may be stacked."""
    grads = dict[str, Gradient]()
    for name, gradient in zip(link.columns, by_column, strict=False):
        if name in needs_grad and gradient is not None:
            parameter = parameters[name]
            groups, columns = (1, *parameter.shape)[-2:]
            grads[name] = gradient[:groups, :columns].reshape(parameter.shape).to(parameter.dtype)
    return grads


def saved(operands: LinkOperands, x: Tensor | None, needs_grad: frozenset[str]) -> Saved:
    """The tensors of the forward that :func:`backward` reads."""
    link, by_keyword, columns, split_sizes = operands
    reads, dtypes = _read_by_gradients(link, needs_grad), {name: each.dtype for name, each in by_keyword.items()}
    inputs = _inputs(link)
    kept = {name: operand for name, operand in by_keyword.items() if not reads.isdisjoint(inputs[name])}
    kept_columns = {name: columns[name] for name in link.columns if not reads.isdisjoint(inputs[name])}
    sizes = split_sizes if _outputs(link, needs_grad) else None
    return Saved(None if reads.isdisjoint(link.program.arguments) else x, kept, dtypes, kept_columns, sizes)


def reads_x(link: Link, needs_grad: frozenset[str]) -> bool:
    """Whether the wanted gradients depend on x."""
    return not _read_by_gradients(link, needs_grad).isdisjoint(link.program.arguments)


def _read_by_gradients(link: Link, needs_grad: frozenset[str]) -> frozenset[str]:
    """The inputs of the program that the wanted gradients depend on."""
    outputs = _outputs(link, needs_grad)
    return part_of(link.program, outputs).reads if outputs else frozenset()


def _inputs(link: Link) -> dict[str, tuple[str, ...]]:
    """The inputs of the program for each operand of the op."""
    program = link.program
    of_rows = dict(zip(link.rows, [(name,) for name in program.rows], strict=True))
    of_columns = dict(zip(link.columns, program.column_operands.values(), strict=True))
    return of_rows | of_columns | dict(zip(link.matrices, program.matrix_operands.values(), strict=True))


def _outputs(link: Link, needs_grad: frozenset[str]) -> tuple[str, ...]:
    """The program's names of the wanted gradients."""
    operands = [f"d{each}" for name, inputs in _inputs(link).items() if name in needs_grad for each in inputs]
    return (*[f"d{name}" for name in link.program.arguments if "x" in needs_grad], *operands)
