"""The quantisers in PyTorch, on any device: the definition in ``ops/quantized/reference.py``, into given memory."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from ...quantized import reference
from ...quantized.copies import BlockedColumns, QuantizedRows
from ..problem import ActivationGrads, stacked
from ..quantized_problem import (
    PermuteQuantizedRows,
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizeRows,
    QuantizeWeight,
    Quantizing,
)
from . import activation

NAME = "torch"


def refusal(problem: Quantizing) -> str | None:
    """None: everything is quantised here, and nothing waits for a device."""
    return None


@singledispatch
def run(problem: Quantizing) -> None:
    """Fills the copies that the problem names."""
    raise TypeError(f"no quantiser of {type(problem).__name__}")


@run.register
def _rows(problem: QuantizeRows) -> None:
    _fill(_gathered(problem), problem.split_sizes, problem.power_of_two, problem.rows, problem.columns)


def _gathered(problem: QuantizeRows) -> Tensor:
    """The rows, from where their tokens lie."""
    if problem.slot_of_row is None:
        return problem.x
    return problem.x.index_select(0, problem.slot_of_row // problem.top_k)


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
    copies = reference.quantize_weight(stacked(problem.weight), problem.halves, problem.power_of_two)
    problem.out.data.copy_(copies.data)
    problem.out.scales.copy_(copies.scales)
    if problem.out.transposed is not None:
        problem.out.transposed.copy_(copies.data.mT)


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
