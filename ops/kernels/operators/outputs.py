"""Allocates the results of kernels, for the door and for the fakes of custom ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ...programs.program import Program
from ...values.activation_spec import ActivationSpec
from ..problems.gemm import (
    ActivationGrads,
    GroupedGemm,
    Layout,
    Matrices,
    Operands,
    PointwiseGrads,
    PointwiseOperands,
    first,
    stacked,
)

Dtypes = tuple[torch.dtype | None, ...]
"""One for each of several results, None for one that is not wanted."""


def new_product(layout: Layout, a: Tensor, b: Matrices, split_sizes: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """A product, of the dtype of ``a`` if none is given."""
    if layout is Layout.TN:
        assert isinstance(b, Tensor)
        return a.new_empty((split_sizes.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype or a.dtype)
    return a.new_empty((a.shape[0], first(b).shape[-2 if layout is Layout.NT else -1]), dtype=out_dtype or a.dtype)


def new_preact_and_postact(
    x: Tensor, weight: Matrices, activation: ActivationSpec, keep_preact: bool
) -> tuple[Tensor | None, Tensor]:
    """The pre-activation, if it is kept, and the activation."""
    columns = first(weight).shape[-2]
    preact = x.new_empty((x.shape[0], columns)) if keep_preact else None
    return preact, x.new_empty((x.shape[0], activation.out_features(columns)))


def new_postact(preact: Tensor, activation: ActivationSpec) -> Tensor:
    """The activation."""
    return preact.new_empty((*preact.shape[:-1], activation.out_features(preact.shape[-1])))


def new_grads(
    preact: Tensor,
    activation: ActivationSpec,
    scales: Tensor | None,
    want_scales: bool,
    want_postact: bool,
    split_sizes: Tensor | None = None,
    bias_dtype: torch.dtype | None = None,
    vectors: Operands = None,
    want_vectors: bool = False,
) -> ActivationGrads:
    """Memory for the wanted gradients; with a ``bias_dtype`` also for that of a bias, one row per group."""
    dscales = scales.new_empty(preact.shape[:-1]) if want_scales and scales is not None else None
    postact = new_postact(preact, activation) if want_postact else None
    dbias = None if split_sizes is None or bias_dtype is None else new_sums(preact, split_sizes, bias_dtype)
    dvectors = like_operands(vectors) if want_vectors else None
    return ActivationGrads(torch.empty_like(preact), dscales, postact, dbias, dvectors)


def like_operands(operands: Operands) -> Operands:
    """As the operands: one by one, or stacked."""
    if operands is None or isinstance(operands, Tensor):
        return None if operands is None else torch.empty_like(operands)
    return tuple([None if each is None else torch.empty_like(each) for each in operands])


def new_sums(tokens: Tensor, split_sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """A row per group."""
    return tokens.new_empty((split_sizes.shape[0], tokens.shape[1]), dtype=dtype)


def new_dots(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """A number per row."""
    return tokens.new_empty((tokens.shape[0],), dtype=dtype)


def new_value(x: Tensor, program: Program) -> Tensor:
    """The value of a pointwise program."""
    return x.new_empty((x.shape[0], x.shape[1] // len(program.arguments)))


class WantedThrough(NamedTuple):
    """The results that are wanted of a backward through a linear and the activation in front of it.

    Attributes:
        bias_dtype: of the sums of the pre-activation's gradient by group; None: they are not wanted.
    """

    want_scales: bool
    want_postact: bool
    want_vectors: bool = False
    bias_dtype: torch.dtype | None = None


class WantedGrads(NamedTuple):
    """The gradients that are wanted of a pointwise program."""

    want_x: bool
    want_numbers: bool
    want_vectors: bool
    want_matrices: bool = False


class GradDtypes(NamedTuple):
    """The dtypes of the gradients of each kind of operand; without any, all of a kind are stacked."""

    numbers: Dtypes = ()
    vectors: Dtypes = ()
    matrices: Dtypes = ()


STACKED = GradDtypes()


def new_pointwise_grads(
    dy: Tensor,
    program: Program,
    operands: PointwiseOperands,
    wanted: WantedGrads,
    dtypes: GradDtypes = STACKED,
) -> PointwiseGrads:
    """The wanted gradients of a pointwise program."""
    sizes = operands.split_sizes
    (rows, width), groups = dy.shape, 1 if sizes is None else sizes.shape[0]
    dx = dy.new_empty((rows, width * len(program.arguments))) if wanted.want_x else None
    of_rows = [(rows,)] * len(program.rows)
    of_columns = [
        (groups if name[0] == "b" else 1, width * len(inputs)) for name, inputs in program.column_operands.items()
    ]
    of_elements = [(rows, width * len(inputs)) for inputs in program.matrix_operands.values()]
    dnumbers = _operand_grads(dy, operands.numbers, of_rows, dtypes.numbers) if wanted.want_numbers else None
    dvectors = _operand_grads(dy, operands.vectors, of_columns, dtypes.vectors) if wanted.want_vectors else None
    dmatrices = _operand_grads(dy, operands.matrices, of_elements, dtypes.matrices) if wanted.want_matrices else None
    return PointwiseGrads(dx, dnumbers, dvectors, dmatrices)


def _operand_grads(
    dy: Tensor, operands: Operands, shapes: Sequence[tuple[int, ...]], dtypes: Dtypes
) -> Tensor | tuple[Tensor | None, ...]:
    """The gradients one by one if their dtypes are given, else as a stack of the largest shape, in a dtype that serves
    all.
    """
    if dtypes:
        return tuple(
            [None if t is None else dy.new_empty(shape, dtype=t) for shape, t in zip(shapes, dtypes, strict=True)]
        )
    dtype = operands.dtype if isinstance(operands, Tensor) else compute_dtype(dy, operands)
    return dy.new_empty((len(shapes), *map(max, zip(*shapes, strict=True))), dtype=dtype)


def compute_dtype(columns: Tensor, numbers: Operands) -> torch.dtype:
    """The dtype in which a pointwise program computes: float32, or wider if an operand is."""
    operands = [columns, *(() if numbers is None else numbers)]
    return reduce(torch.promote_types, [t.dtype for t in operands if t is not None], torch.float32)


def fill_without_rows(problem: GroupedGemm) -> None:
    """Without rows a product is zero: nothing to write for NT and NN, a weight gradient of zeros for TN."""
    for g, out in enumerate([problem.out] if isinstance(problem.out, Tensor) else problem.out):
        if problem.beta is None:
            out.zero_()
        elif problem.layout is Layout.TN:
            out.mul_(_factor_of(problem.beta, g, out))
        if problem.bias is not None and problem.layout is Layout.TN:
            out.add_(problem.bias[g] if out.dim() == 2 else stacked(problem.bias).unsqueeze(1))


def _factor_of(factor: float | Tensor, group: int, out: Tensor) -> float | Tensor:
    """The factor of a matrix of a group, or those of a stack of all."""
    if not isinstance(factor, Tensor) or not factor.dim():
        return factor
    return factor[group] if out.dim() == 2 else factor.view(-1, 1, 1)
