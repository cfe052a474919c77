"""The quantisers in PyTorch, on any device: the definition in ``ops/formats/reference.py``, into given memory."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from ...formats import operands, reference
from ...formats.copies import BlockedColumns, QuantizedRows, RowWeight, Scaling
from ...formats.recipe import Float8Row, Float8Tensor
from ..problems.gemm import ActivationGrads, stacked
from ..problems.quantized import (
    PermuteQuantizedRows,
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizeRows,
    QuantizeWeight,
    Quantizing,
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
    _fill(_gathered(problem), problem.split_sizes, problem.power_of_two, problem.rows, problem.columns)


def _gathered(problem: QuantizeRows) -> Tensor:
    """The rows, from where their tokens lie."""
    if problem.slot_of_row is None:
        return problem.x
    return problem.x.index_select(0, problem.slot_of_row // problem.top_k)


def _fill_whole(problem: QuantizeRows) -> None:
    wanted = {"rows": problem.rows is not None, "columns": problem.columns is not None, "encode": problem.encode}
    copied = operands.of_tokens(_recipe(problem), _gathered(problem), problem.split_sizes, **wanted)  # type: ignore[arg-type]
    for to, copy in ((problem.rows, copied.rows), (problem.columns, copied.columns)):
        if to is not None:
            to.data.copy_(copy.data)  # type: ignore[union-attr]
            to.scales.copy_(copy.scales)  # type: ignore[union-attr]


def _recipe(problem: QuantizeRows | QuantizeWeight) -> Float8Row | Float8Tensor:
    """One with such copies."""
    of = Float8Row if problem.scaling is Scaling.ROWS else Float8Tensor
    return of(scales="power_of_two" if problem.power_of_two else "float32")


@run.register
def _permute(problem: PermuteQuantizedRows) -> None:
    source, out = problem.source, problem.out
    token = problem.slot_of_row // problem.row_of_slot.shape[1]
    out.data.copy_(source.data.view(torch.uint8).index_select(0, token).view(source.data.dtype))
    out.scales[:, : len(token)] = source.scales.index_select(1, token)


def _fill(
    x: Tensor, split_sizes: Tensor, is_power_of_two: bool, rows: QuantizedRows | None, columns: BlockedColumns | None
) -> None:
    if rows is not None:
        data, scales = reference.quantize_rows(x, is_power_of_two)
        rows.data.copy_(data)
        rows.scales.copy_(scales)
    if columns is not None:
        data, scales = reference.quantize_columns(x, split_sizes, is_power_of_two)
        columns.data.copy_(data)
        columns.scales.copy_(scales)


@run.register
def _quantize_weight(problem: QuantizeWeight) -> None:
    if isinstance(problem.out, RowWeight):
        return _fill_weight(problem, problem.out)
    copies = reference.quantize_weight(stacked(problem.weight), problem.halves, problem.power_of_two)
    problem.out.data.copy_(copies.data)
    problem.out.scales.copy_(copies.scales)
    if problem.out.transposed is not None:
        problem.out.transposed.copy_(copies.data.mT)


def _fill_weight(problem: QuantizeWeight, out: RowWeight) -> None:
    copies = operands.of_weight(
        _recipe(problem), stacked(problem.weight), out.transposed is not None, encode=problem.encode
    )
    for to, scales, copy in (
        (out.data, out.scales, copies.forward),
        (out.transposed, out.transposed_scales, copies.backward),
    ):
        if to is not None and scales is not None:
            to.copy_(copy.data)  # type: ignore[union-attr]
            scales.copy_(copy.scales)  # type: ignore[union-attr, arg-type]


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
