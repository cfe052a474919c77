"""The quantisers in PyTorch, on any device: the definition in ``ops/formats/reference.py``, into given memory."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from ...formats import reference
from ...formats.copies import Columns, Rows, Scaling, Weight
from ...formats.float8 import definition
from ...formats.quantized_tokens import decoded
from ...formats.recipe import Recipe
from ..problems.gemm import ActivationGrads, stacked
from ..problems.quantized import (
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizeRows,
    QuantizeWeight,
    Quantizing,
    RowWeight,
)
from . import activation

NAME = "torch"


@singledispatch
def run(problem: Quantizing) -> None:
    """Fills the copies that the problem names."""
    raise TypeError(f"no quantiser of {type(problem).__name__}")


@run.register
def _rows(problem: QuantizeRows) -> None:
    if problem.scaling is not Scaling.BLOCKS:
        return _fill_whole(problem)
    x = problem.gathered() if problem.exponents is None else decoded(problem.x, problem.exponents)
    _fill(x, problem.split_sizes, problem.power_of_two, problem.rows, problem.columns)


def _fill_whole(problem: QuantizeRows) -> None:
    wanted = problem.rows is not None, problem.columns is not None
    rows, columns = _recipe(problem).token_operands(problem.gathered(), problem.split_sizes, *wanted)
    for to, copy in ((problem.rows, rows), (problem.columns, columns)):
        if to is not None and copy is not None:
            _copy(copy, to.data, to.scales)


def _copy(copy: Rows | Columns | Weight, data: Tensor | None, scales: Tensor | None) -> None:
    """Into memory for bytes and scales."""
    assert data is not None
    assert scales is not None
    assert copy.scales is not None
    data.copy_(copy.data)
    scales.copy_(copy.scales)


def _recipe(problem: QuantizeRows | QuantizeWeight) -> Recipe:
    """The one that defines the problem."""
    return definition(problem.scaling, problem.power_of_two).with_scales(problem.encode)


def _fill(x: Tensor, split_sizes: Tensor, is_power_of_two: bool, rows: Rows | None, columns: Columns | None) -> None:
    if rows is not None:
        _copy(reference.quantize_rows(x, is_power_of_two), rows.data, rows.scales)
    if columns is not None:
        _copy(reference.quantize_columns(x, split_sizes, is_power_of_two), columns.data, columns.scales)


@run.register
def _quantize_weight(problem: QuantizeWeight) -> None:
    if isinstance(problem.out, RowWeight):
        return _fill_weight(problem, problem.out)
    copies = reference.quantize_weight(stacked(problem.weight), problem.halves, problem.power_of_two)
    _copy(copies, problem.out.data, problem.out.scales)
    if problem.out.transposed is not None:
        problem.out.transposed.copy_(copies.data.mT)


def _fill_weight(problem: QuantizeWeight, out: RowWeight) -> None:
    copies = _recipe(problem).weight_operands(stacked(problem.weight), out.transposed is not None)
    _copy(copies.forward, out.data, out.scales)
    if copies.backward is not None:
        _copy(copies.backward, out.transposed, out.transposed_scales)


@run.register
def _quantize_activation(problem: QuantizeActivation) -> None:
    preact, spec = problem.preact, problem.activation
    postact = preact.new_empty((preact.shape[0], spec.out_features(preact.shape[1])))
    activation.forward(preact, spec, problem.scales, postact)
    _fill(postact, problem.split_sizes, problem.power_of_two, problem.rows, problem.columns)


@run.register
def _quantize_activation_backward(problem: QuantizeActivationBackward) -> None:
    preact, dpostact, sizes = problem.preact, problem.dpostact, problem.split_sizes
    postact = None if problem.postact_columns is None else torch.empty_like(dpostact)
    grads = ActivationGrads(torch.empty_like(preact), problem.dscales, postact)
    activation.backward(dpostact, preact, problem.activation, problem.scales, grads)
    _fill(grads.preact, sizes, problem.power_of_two, problem.rows, problem.columns)
    if postact is not None:
        _fill(postact, sizes, problem.power_of_two, None, problem.postact_columns)
    if problem.dscales is not None:
        problem.dscales.masked_fill_(torch.arange(preact.shape[0], device=sizes.device) >= sizes.sum(), 0)
