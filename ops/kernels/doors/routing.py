"""The door to the kernels that bring rows to experts and back: our own on a GPU, where one runs, or PyTorch's.

T tokens have k slots each, S = T k in all, each with the id of its expert. The rows of the experts are the slots sorted
by expert, stably. Ids below 0 and from E on belong to no expert: their rows come last, add nothing, and get no
gradient. Everything stays on the device, and results are deterministic.

Only our own kernels are custom ops. Elsewhere, compiled code consists of PyTorch's operations, which a compiler knows.
An op may run where our own kernels do not: on another device than it was traced on, or under other switches. So it asks
again when it runs, and falls back to PyTorch's kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ....fuser.contract import tracing as trace
from .. import dispatch
from ..extension import TYPE_CODES
from ..operators.custom_ops import kernel
from ..problems.gemm import nbytes
from ..problems.routing import GatherSlots, OrderSlots, SlotOrder, SpreadRows, SumRows

_OURS = "fusible"  # kernels, in words
_SORTED_AT_ONCE = 4096  # by one block of threads, so torch does


class Routing(NamedTuple):
    """Which of the S rows of the experts belongs to which of the k slots of a token.

    Attributes:
        tokens_per_expert: int32 [E + 1]: how many rows each expert has, and how many all have together.
        slot_of_row: [S]: the slot, token * k + j, of each row.
        row_of_slot: [T, k]: the row of each slot.
        is_native: whether our own kernels made it, which alone read indices of 32 bits.
        scales: [S]: the weight of each row, in float32; None if no weights were given, weights of 64 bits, or by
            PyTorch's kernels.
    """

    tokens_per_expert: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    is_native: bool
    scales: Tensor | None = None

    @property
    def split_sizes(self) -> Tensor:
        """int32 [E]: how many rows each expert has."""
        return self.tokens_per_expert[:-1]

    @property
    def num_rows(self) -> Tensor:
        """int32 [1]: how many rows all experts have together."""
        return self.tokens_per_expert[-1:]


def refusal(top_k_index: Tensor, num_experts: int, dtype: torch.dtype) -> str | None:
    """Why our own kernels do not route these ids and rows of this dtype; None: they do."""
    return dispatch.refusal(OrderSlots(top_k_index, num_experts, dtype))


def routed_by(ids: torch.dtype, device: torch.device, num_experts: int, slots: int, dtype: torch.dtype) -> str:
    """For ``explain``: the backend that routes so many ids, and rows of ``dtype``, and the reason if it is not ours."""
    why = refusal(torch.empty(1, dtype=ids, device=device).expand(slots), num_experts, dtype)
    return _OURS if why is None else f"torch: {why}"


def route(
    top_k_index: Tensor, num_experts: int, dtype: torch.dtype = torch.bfloat16, weights: Tensor | None = None
) -> Routing:
    """The stable order by expert of the ids [T, k].

    Args:
        dtype: of the rows that will be moved.
        weights: [T, k], dense, to be brought into the order of the rows.
    """
    if _is_traced(top_k_index) and not top_k_index.is_cuda:
        return by_torch(top_k_index, num_experts)
    problem = OrderSlots(top_k_index, num_experts, dtype)
    choice = dispatch.choose(problem, tracing=trace.active() or _is_traced(top_k_index))
    if trace.active():
        dispatch.record(problem, choice)
    if choice.is_fallback:
        return by_torch(top_k_index, num_experts)
    read = weights if weights is not None and weights.dtype in TYPE_CODES else None  # 64 bits stay with PyTorch
    order = order_slots(top_k_index, num_experts, read)
    return Routing(order.tokens_per_expert, order.slot_of_row, order.row_of_slot, True, order.scales)


def _new_order(top_k_index: Tensor, num_experts: int, weights: Tensor | None = None) -> SlotOrder:
    sizes, slots = (top_k_index.new_empty(n, dtype=torch.int32) for n in (num_experts + 1, top_k_index.numel()))
    rows = torch.empty_like(top_k_index, dtype=torch.int32, memory_format=torch.contiguous_format)
    return SlotOrder(sizes, slots, rows, None if weights is None else slots.new_empty(slots.shape, dtype=torch.float32))


@kernel(_new_order, name="route", obeys_switches=False, eager_only=("weights", "scales"))
def order_slots(top_k_index: Tensor, num_experts: int, weights: Tensor | None = None) -> SlotOrder:
    """The order by expert of the ids [T, k], and ``weights`` in the order of the rows."""
    problem, tracing = OrderSlots(top_k_index, num_experts, torch.float32, weights), trace.active()
    choice = dispatch.choose(problem, tracing)
    if choice.is_fallback:
        routing = by_torch(top_k_index, num_experts)
        return SlotOrder(routing.tokens_per_expert, routing.slot_of_row.int(), routing.row_of_slot.int())
    if tracing:
        return _new_order(top_k_index, num_experts, weights)
    choice.kernels.run(problem)
    assert problem.out is not None
    return problem.out


def permute(x: Tensor, routing: Routing, fill: bool = True) -> Tensor:
    """The rows of the experts, [S, H], from those of the tokens, [T, H].

    Args:
        fill: whether rows of no expert shall be finite; else they may be anything.
    """
    if not routing.is_native:
        slots = routing.row_of_slot.shape[1]
        spread = x.index_select(0, routing.slot_of_row if slots == 1 else routing.slot_of_row // max(1, slots))
        _record_torch(routing, x, spread)
        return spread
    return spread_rows(x, routing.row_of_slot, routing.tokens_per_expert, fill)


_SCHEMA_NAMES = {"row_of_slot": "place", "tokens_per_expert": "counts"}


def _new_rows(x: Tensor, row_of_slot: Tensor) -> Tensor:
    return x.new_empty(row_of_slot.numel(), x.shape[1])


@kernel(_new_rows, obeys_switches=False, eager_only=("fill",), schema_names=_SCHEMA_NAMES)
def spread_rows(x: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor, fill: bool = True) -> Tensor:
    """:func:`permute`, by indices that our own kernels made."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = _new_rows(x, row_of_slot)
    if dispatch.is_solved(SpreadRows(x, row_of_slot, tokens_per_expert, out, fill)):
        return out
    return permute(x, _routing_of_torch(row_of_slot, tokens_per_expert))


def unpermute(rows: Tensor, routing: Routing) -> Tensor:
    """[T, H]: the sum of each token's rows [S, H], summed in float32 at least and rounded once."""
    if not routing.is_native:
        sums = _sum_of_slots(rows, routing.row_of_slot)
        _record_torch(routing, rows, sums)
        return sums
    return sum_rows(rows, routing.row_of_slot, routing.tokens_per_expert)


def _new_sums(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    return rows.new_empty(row_of_slot.shape[0], rows.shape[1])


@kernel(_new_sums, obeys_switches=False, schema_names=_SCHEMA_NAMES)
def sum_rows(rows: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """:func:`unpermute`, by indices that our own kernels made."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = _new_sums(rows, row_of_slot)
    if dispatch.is_solved(SumRows(rows, row_of_slot, tokens_per_expert, out)):
        return out
    return unpermute(rows, _routing_of_torch(row_of_slot, tokens_per_expert))


def _routing_of_torch(row_of_slot: Tensor, tokens_per_expert: Tensor) -> Routing:
    """The routing for PyTorch's kernels to permute rows by our indices."""
    return Routing(tokens_per_expert, row_of_slot.view(-1).argsort(), row_of_slot, is_native=False)


def by_row(weights: Tensor, routing: Routing) -> Tensor:
    """[S]: the weights [T, k] in the order of the rows."""
    return weights.reshape(-1).index_select(0, routing.slot_of_row)


def scales_of(routing: Routing, weights: Tensor) -> Tensor:
    """The routing weights [T, k] in the order of the rows, [S], in at least float32."""
    if routing.scales is not None:
        return routing.scales
    return by_row(weights, routing).to(torch.promote_types(weights.dtype, torch.float32))


def by_slot(numbers: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """For each slot [T, k] the number of its row, from ``numbers`` [S], in ``dtype``; 0 for slots of no expert."""
    kinds_fit = numbers.dtype == torch.float32 and dtype in TYPE_CODES
    if routing.is_native and kinds_fit and not _is_traced(numbers):
        out = torch.empty_like(routing.row_of_slot, dtype=dtype)
        if dispatch.is_solved(GatherSlots(numbers, routing.row_of_slot, routing.tokens_per_expert, out)):
            return out
    gathered = numbers.index_select(0, routing.row_of_slot.view(-1)).view_as(routing.row_of_slot)
    slots = torch.where(routing.row_of_slot < routing.num_rows, gathered, 0).to(dtype)
    _record_torch(routing, numbers, slots)
    return slots


def of_indices(num_rows: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, dtype: torch.dtype) -> Routing:
    """The routing that :func:`permute` and :func:`unpermute` of rows of ``dtype`` need, from its parts.

    Only our own kernels make and read 32-bit indices.
    """
    native = row_of_slot.dtype == torch.int32 and refusal(row_of_slot, 1, dtype) is None
    return Routing(num_rows, slot_of_row, row_of_slot, native)


def valid_rows(rows: Tensor, routing: Routing) -> Tensor:
    """The rows [S, H], with zeros for rows of no expert; a copy only if there may be such rows and no kernel skips
    them.
    """
    if routing.is_native or (
        rows.device.type == "cpu" and not trace.has_no_data(rows) and int(routing.num_rows) == rows.shape[0]
    ):
        return rows
    inside = torch.arange(rows.shape[0], device=rows.device) < routing.num_rows
    return torch.where(inside.unsqueeze(-1), rows, 0)


def _is_traced(tensor: Tensor) -> bool:
    """Whether a compiler traces. Dynamo does not see this code: it has the steps of a plan as calls in its graph."""
    return type(tensor) is not Tensor and trace.is_traced(tensor)


def _record_torch(routing: Routing, source: Tensor, out: Tensor) -> None:
    """Tells a trace, if there is one, of a permutation by PyTorch's kernels."""
    if not trace.active():
        return
    if routing.is_native:
        odd = out if source.dtype == torch.float32 else source
        why: str | None = f"{_OURS} has no kernel for numbers of {odd.dtype}"
    else:
        why = refusal(routing.row_of_slot, 1, source.dtype)
    reason = why or "the rows were sorted by PyTorch"
    trace.record(trace.KernelCall("torch", reason if source.is_cuda else "", 0, nbytes(source, out)))


def by_torch(top_k_index: Tensor, num_experts: int) -> Routing:
    """:func:`route` without our own kernels."""
    ids, slots = _within(top_k_index.reshape(-1), num_experts), top_k_index.shape[-1]
    ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    starts = torch.searchsorted(ids, experts, out_int32=True)
    counts = torch.cat((starts[1:] - starts[:-1], starts[-1:]))
    rows = torch.arange(order.shape[0], device=ids.device)
    row_of_slot = torch.empty_like(order).scatter_(0, order, rows)
    return Routing(counts, order, row_of_slot.view(-1, slots), is_native=False)


def _within(ids: Tensor, num_experts: int) -> Tensor:
    """The ids, with E for no expert, in few bits, over which a radix sort of many ids takes less time."""
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    large = ids.is_cuda and ids.shape[0] > _SORTED_AT_ONCE
    return ids.to(torch.int16) if large and num_experts < torch.iinfo(torch.int16).max else ids


def _sum_of_slots(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    tokens, slots = row_of_slot.shape
    if not rows.is_cuda:  # without the gathered rows, whose memory costs a CPU ten times what the sum does
        return F.embedding_bag(row_of_slot, rows, mode="sum")
    if slots == 1:
        return rows.index_select(0, row_of_slot.view(-1))
    return rows.index_select(0, row_of_slot.view(-1)).view(tokens, slots, rows.shape[1]).sum(1)
