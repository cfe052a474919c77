"""The routed experts of a layer on a CPU, for calls that are so short that the host decides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..hopper.routed_mlp import Experts
from . import short_mlp
from .short_mlp import Gradients, Kept, MLPForm, RowGroups, WantedGradients

_MOST_NUMBERS = 256


@dataclass(slots=True, eq=False)
class Order:
    """Which of the S rows, the slots sorted by expert, belongs to which of the k slots of a token.

    A backward reads what its forward has made, and nobody changes it.

    Attributes:
        slot_of_row, token_of_row: [S].
        row_of_slot: [T, k]; None where one token has all rows, and they may be summed in any order.
    """

    slot_of_row: Tensor
    token_of_row: Tensor
    row_of_slot: Tensor | None


def refusal(x: Tensor, top_k_index: Tensor, up: Tensor, down: Tensor) -> str | None:
    """Why the layer runs kernel by kernel; None: it does not."""
    rows = top_k_index.numel()
    if not rows:
        return "has no rows"
    return short_mlp.refusal(x, rows, up, down)


def run(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts) -> tuple[Tensor, Kept, Order] | None:
    """The weighted sum [T, H] of what its experts make of each token, and what a backward reads.

    None in a mode whose tensors hold no data.
    """
    sorted_slots = _sorted(top_k_index, experts.up.shape[0])
    if sorted_slots is None:
        return None
    ids, slot_of_row = sorted_slots
    groups = _groups(ids, experts)
    order = _order(slot_of_row, top_k_index.shape[0], x.dtype)
    rows = x.index_select(0, order.token_of_row)
    scales = top_k_weights.reshape(-1).index_select(0, slot_of_row)
    if scales.dtype.itemsize < 4:
        scales = scales.float()
    y, preact = short_mlp.forward(rows, experts, groups, scales, after=True)
    form = MLPForm(experts.spec, experts.transposed, after=True)
    kept = Kept(x, experts.up, experts.down, experts.down_bias, preact, scales, groups, form)
    return _sum_of_slots(y, order, groups), kept, order


def backward(order: Order, kept: Kept, dy: Tensor, wanted: WantedGradients) -> Gradients:
    """The gradients: ``rows`` is that of the tokens [T, H], ``scales`` that of the routing weights [T, k]."""
    if kept.rows is not None:
        kept = kept._replace(rows=kept.rows.index_select(0, order.token_of_row))
    grads = short_mlp.backward(kept, dy.index_select(0, order.token_of_row), wanted)
    rows, dots = grads.rows, grads.scales
    if rows is not None:
        rows = _sum_of_slots(rows, order, kept.groups)
    if dots is not None:
        dots = torch.empty_like(dots).scatter_(0, order.slot_of_row, dots).view(dy.shape[0], -1)
    return Gradients(rows, dots, *grads[2:])


def _sorted(top_k_index: Tensor, groups: int) -> tuple[Tensor, Tensor] | None:
    """The experts of the rows, in order, those of none at last, and the slot of each row."""
    ids, slot_of_row = top_k_index.reshape(-1).sort(stable=True)
    if type(ids) is not Tensor:
        return None
    if int(ids[0]) < 0:  # of no expert, as those past the last are, which come last
        return _sorted(top_k_index.masked_fill(top_k_index < 0, groups), groups)
    return ids, slot_of_row


def _groups(ids: Tensor, experts: Experts) -> RowGroups:
    groups = experts.up.shape[0]
    ends = torch.searchsorted(ids, _numbers(groups, 1, ids.dtype), right=True, out_int32=True)
    end = int(ends[-1])
    if end < ids.shape[0]:
        ids.clamp_(max=groups - 1)
    return RowGroups.of_rows(ends, end, ids, experts)


def _order(slot_of_row: Tensor, tokens: int, dtype: torch.dtype) -> Order:
    slots = slot_of_row.shape[0] // tokens
    if tokens == 1:
        token_of_row = _zeros(slots)
        if slots <= 2 and dtype.itemsize > 2:  # two numbers have one sum; of 16 bits, embedding_bag rounds as it likes
            return Order(slot_of_row, token_of_row, None)
    else:
        token_of_row = slot_of_row if slots == 1 else torch.floor_divide(slot_of_row, slots)
    row_of_slot = torch.empty_like(slot_of_row).scatter_(0, slot_of_row, _numbers(slot_of_row.shape[0]))
    return Order(slot_of_row, token_of_row, row_of_slot.view(-1, slots))


def _sum_of_slots(rows: Tensor, order: Order, groups: RowGroups) -> Tensor:
    short_mlp.zero_tail(rows, groups)
    if order.row_of_slot is None:
        return rows.sum(0, keepdim=True)
    slots, count = order.row_of_slot.view(-1), order.row_of_slot.shape[1]
    return torch.embedding_bag(rows, slots, _numbers(slots.shape[0], count))[0]


@lru_cache(_MOST_NUMBERS)
def _numbers(end: int, step: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
    """``arange``, kept between calls: nothing writes into it, and making it takes a part of a short call's time."""
    return torch.arange(0, end, step, dtype=dtype, device="cpu")


@lru_cache(_MOST_NUMBERS)
def _zeros(count: int) -> Tensor:
    """Kept in the same way."""
    return torch.zeros(count, dtype=torch.int64, device="cpu")
