"""The routed experts of a layer on a CPU, for calls that are so short that the host decides.

The same operations on the same numbers as one kernel after the other, with nothing in between. Rows of no expert come
last; what is computed for them may be anything, and nothing reads it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..hopper.routed_mlp import Experts
from ..problem import ActivationGrads, GroupedGemm, Layout
from . import activation, few_rows, grouped_mm_cpu, loop

_MOST_NUMBERS = 256


class Order(NamedTuple):
    """Which of the S rows, the slots sorted by expert, belongs to which of the k slots of a token.

    Attributes:
        slot_of_row, token_of_row: [S].
        row_of_slot: [T, k]; None where one token has all rows, and they may be summed in any order.
        expert_of_row: [S]; the last for rows of no expert.
        ends: int32 [E]: where the rows of each expert end.
        end: where those of the last do.
    """

    slot_of_row: Tensor
    token_of_row: Tensor
    row_of_slot: Tensor | None
    expert_of_row: Tensor
    ends: Tensor
    end: int


class Forward(NamedTuple):
    """The output [T, H], and what a backward reads: the order, the weight of each row [S], and the pre-activation."""

    y: Tensor
    order: Order
    scales: Tensor
    preact: Tensor


def refusal(x: Tensor, top_k_index: Tensor, up: Tensor, down: Tensor) -> str | None:
    """Why the layer runs kernel by kernel; None: it does not."""
    rows = top_k_index.numel()
    if x.device.type != "cpu" or x.is_cuda:
        return f"needs a CPU, got {x.device.type}"
    if not rows or not few_rows.are_few(rows, max(up.shape[1:]), x.dtype):
        return f"takes few rows, and not none, got {rows}"
    if x.stride(-1) != 1 or up.stride(-1) != 1 or down.stride(-1) != 1:
        return "needs dense rows"
    return None


def run(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts) -> Forward | None:
    """The weighted sum of what its experts make of each token; None in a mode whose tensors hold no data."""
    up, down, up_bias, down_bias, spec, transposed = experts
    order = _order(top_k_index, up.shape[0], x.dtype)
    if order is None:
        return None
    loop.keep_freed_memory()
    preact = _through(x.index_select(0, order.token_of_row), up, order, transposed, up_bias)
    scales = top_k_weights.reshape(-1).index_select(0, order.slot_of_row)
    if scales.dtype.itemsize < 4:
        scales = scales.float()
    y = _through(activation.postact(preact, spec), down, order, transposed, down_bias, scales)
    return Forward(_sum_of_slots(y, order), order, scales, preact)


class Backward:
    """The gradients of a layer: each is computed when it is asked for, from that of the pre-activation.

    Args:
        kept: of the forward, but for its output.
        dy: [T, H].
        of_weights: whether the gradient of the routing weights is wanted; ``of_down``: that of the second weight.
    """

    def __init__(
        self, kept: Forward, tokens: Tensor | None, experts: Experts, dy: Tensor, of_weights: bool, of_down: bool
    ) -> None:
        self.order, self.scales, self.tokens, self.experts = kept.order, kept.scales, tokens, experts
        self.rows, self.num_tokens = dy.index_select(0, self.order.token_of_row), dy.shape[0]
        dpostact = _through(self.rows, experts.down, self.order, not experts.transposed)
        dots = torch.empty_like(kept.scales) if of_weights else None
        postact = torch.empty_like(dpostact) if of_down else None
        self.grads = ActivationGrads(torch.empty_like(kept.preact), dots, postact)
        activation.backward(dpostact, kept.preact, experts.spec, kept.scales, self.grads)

    def x(self) -> Tensor:
        """[T, H]."""
        rows = _through(self.grads.preact, self.experts.up, self.order, not self.experts.transposed)
        return _sum_of_slots(rows, self.order)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """[T, k], 0 for slots of no expert."""
        dots, order, bias = self.grads.scales, self.order, self.experts.down_bias
        assert dots is not None
        if bias is not None:
            dots += few_rows.row_dots(self.rows, bias, order.expert_of_row)
        _zero_tail(dots, order)
        of_slots = torch.empty_like(dots).scatter_(0, order.slot_of_row, dots)
        return of_slots.view(self.num_tokens, -1).to(dtype)

    def up(self) -> Tensor:
        """As the first weight is stored."""
        assert self.tokens is not None
        return self._product(self.tokens.index_select(0, self.order.token_of_row), self.grads.preact)

    def down(self) -> Tensor:
        """As the second weight is stored."""
        assert self.grads.postact is not None
        return self._product(self.grads.postact, self.rows)

    def up_bias(self, dtype: torch.dtype) -> Tensor:
        """[E, C]."""
        return self._sums(self.grads.preact, None).to(dtype)

    def down_bias(self, dtype: torch.dtype) -> Tensor:
        """[E, H]."""
        return self._sums(self.rows, self.scales[: self.order.end]).to(dtype)

    def _product(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """By expert, of what a linear read and of the gradient of what it gave."""
        left, right = (inputs, outputs) if self.experts.transposed else (outputs, inputs)
        problem = GroupedGemm(Layout.TN, left, right, self.order.ends, left, fresh=True)
        return _multiply(problem, self.order, (self.order.ends.shape[0], left.shape[1], right.shape[1]))

    def _sums(self, rows: Tensor, scales: Tensor | None) -> Tensor:
        """By expert."""
        end, experts = self.order.end, self.order.ends.shape[0]
        return few_rows.column_sums(rows[:end], self.order.expert_of_row[:end], experts, scales)


def _order(top_k_index: Tensor, groups: int, dtype: torch.dtype) -> Order | None:
    tokens, slots = top_k_index.shape
    ids, slot_of_row = top_k_index.reshape(-1).sort(stable=True)
    if type(ids) is not Tensor:
        return None
    if int(ids[0]) < 0:  # of no expert, as those past the last are, which come last
        return _order(top_k_index.masked_fill(top_k_index < 0, groups), groups, dtype)
    ends = torch.searchsorted(ids, _numbers(groups, 1, ids.dtype), right=True, out_int32=True)
    end = int(ends[-1])
    if end < ids.shape[0]:
        ids.clamp_(max=groups - 1)
    if tokens == 1:
        token_of_row = _zeros(slots)
        if slots <= 2 and dtype.itemsize > 2:  # two numbers have one sum; of 16 bits, embedding_bag rounds as it likes
            return Order(slot_of_row, token_of_row, None, ids, ends, end)
    else:
        token_of_row = slot_of_row if slots == 1 else torch.floor_divide(slot_of_row, slots)
    row_of_slot = torch.empty_like(slot_of_row).scatter_(0, slot_of_row, _numbers(ids.shape[0]))
    return Order(slot_of_row, token_of_row, row_of_slot.view(-1, slots), ids, ends, end)


def _through(
    rows: Tensor,
    weight: Tensor,
    order: Order,
    transposed: bool,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """The rows through a weight that is stored as [E, out, in], or as [E, in, out] if ``transposed``."""
    layout = Layout.NN if transposed else Layout.NT
    problem = GroupedGemm(layout, rows, weight, order.ends, rows, bias=bias, row_scale=scales, fresh=True)
    return _multiply(problem, order, (rows.shape[0], weight.shape[-1 if transposed else -2]))


def _multiply(problem: GroupedGemm, order: Order, shape: tuple[int, ...]) -> Tensor:
    """A problem whose output comes later: in place of it stands a tensor of its dtype."""
    if grouped_mm_cpu.refusal(problem) is None:
        out = grouped_mm_cpu.product(problem, order.ends).contiguous()
    else:
        out = problem.a.new_empty(shape)
        if problem.layout is Layout.TN or (problem.bias is not None and problem.a.dtype.itemsize < 4):
            loop.multiply_until(replace(problem, out=out), order.ends.tolist())
            return out
        loop.multiply_runs(problem, Counter(order.expert_of_row.tolist()[: order.end]), out)
    if problem.bias is not None:
        few_rows.add_vectors(out, problem.bias, order.expert_of_row)
    if problem.row_scale is not None:
        out.mul_(problem.row_scale.unsqueeze(-1))
    return out


def _sum_of_slots(rows: Tensor, order: Order) -> Tensor:
    _zero_tail(rows, order)
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


def _zero_tail(rows: Tensor, order: Order) -> None:
    if order.end < rows.shape[0]:
        rows[order.end :].zero_()
