"""The door to the kernels that bring rows to experts and back: our own on a Hopper GPU, PyTorch's anywhere else.

T tokens have k slots each, S = T k in all, each with the id of its expert. The rows of the experts are the slots sorted
by expert, stably. Ids from E on are of no expert: their rows come last, add nothing, and get no gradient.
All of it stays on the device, and gives the same bits every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..fuser import tracing as trace
from .kernels.dispatch import permute_refusal
from .kernels.hopper import permute as kernels
from .kernels.problem import nbytes

_SORTED_AT_ONCE = 4096  # by one block of threads, so torch does


class Routing(NamedTuple):
    """Which of the S rows of the experts belongs to which of the k slots of a token.

    Attributes:
        tokens_per_expert: int32 [E + 1]: how many rows each expert has, and how many all have together.
        slot_of_row: [S]: the slot, token * k + j, of each row.
        row_of_slot: [T, k]: the row of each slot.
        is_native: whether the kernels of the extension made it, which alone read indices of 32 bits.
        scales: [S]: the weight of each row, in float32; None if no weights were given, or by PyTorch's kernels.
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
    return permute_refusal(top_k_index, num_experts, dtype)


def routed_by(ids: torch.dtype, device: torch.device, num_experts: int, slots: int, dtype: torch.dtype) -> str:
    """For ``explain``: whose kernels route so many ids, and rows of ``dtype``; and why not our own."""
    why = permute_refusal(torch.empty(1, dtype=ids, device=device).expand(slots), num_experts, dtype)
    return kernels.NAME if why is None else f"torch: {why}"


def route(
    top_k_index: Tensor, num_experts: int, dtype: torch.dtype = torch.bfloat16, weights: Tensor | None = None
) -> Routing:
    """The stable order by expert of the ids [T, k].

    Args:
        dtype: of the rows that will be moved.
        weights: [T, k], dense, to be brought into the order of the rows.
    """
    if _is_compiled(top_k_index):
        own = top_k_index.is_cuda and refusal(top_k_index, num_experts, dtype) is None
        return _traced(top_k_index, num_experts) if own else by_torch(top_k_index, num_experts)
    why = refusal(top_k_index, num_experts, dtype)
    if trace.active():
        _record("route", why, top_k_index)
    if why is not None:
        return by_torch(top_k_index, num_experts)
    if trace.active():
        return _without_data(top_k_index, num_experts, weights)
    counts, order, place, scales = kernels.route(top_k_index, num_experts, weights)
    return Routing(counts, order, place, True, scales)


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
    if _is_compiled(x):
        rows: Tensor = torch.ops.fusible.spread_rows(x, routing.row_of_slot, routing.tokens_per_expert)
        return rows
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(routing.slot_of_row.shape[0], x.shape[1])
    if trace.active():
        _record("spread", None, x, out)
        return out
    kernels.permute(x, routing.row_of_slot, routing.tokens_per_expert, out, fill)
    return out


def unpermute(rows: Tensor, routing: Routing) -> Tensor:
    """[T, H]: the sum of each token's rows [S, H], summed in float32 at least and rounded once."""
    if not routing.is_native:
        sums = _sum_of_slots(rows, routing.row_of_slot)
        _record_torch(routing, rows, sums)
        return sums
    if _is_compiled(rows):
        summed: Tensor = torch.ops.fusible.sum_rows(rows, routing.row_of_slot, routing.tokens_per_expert)
        return summed
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = rows.new_empty(routing.row_of_slot.shape[0], rows.shape[1])
    if trace.active():
        _record("sum", None, rows, out)
        return out
    kernels.unpermute(rows, routing.row_of_slot, routing.tokens_per_expert, out)
    return out


def by_row(weights: Tensor, routing: Routing) -> Tensor:
    """[S]: the weights [T, k] in the order of the rows."""
    return weights.reshape(-1).index_select(0, routing.slot_of_row)


def scales_of(routing: Routing, weights: Tensor) -> Tensor:
    """[S]: the weights [T, k] in the order of the rows, in float32 at least; those that came with the routing."""
    if routing.scales is not None:
        return routing.scales
    return by_row(weights, routing).to(torch.promote_types(weights.dtype, torch.float32))


def by_slot(numbers: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """[T, k] in ``dtype``: of each slot the number [S] of its row, 0 for those of no expert."""
    if routing.is_native and numbers.dtype == torch.float32 and not _is_compiled(numbers):
        out = torch.empty_like(routing.row_of_slot, dtype=dtype)
        if trace.active():
            _record("by slot", None, numbers, out)
            return out
        kernels.of_slots(numbers, routing.row_of_slot, routing.tokens_per_expert, out)
        return out
    found = numbers.index_select(0, routing.row_of_slot.view(-1)).view_as(routing.row_of_slot)
    slots = torch.where(routing.row_of_slot < routing.num_rows, found, 0).to(dtype)
    _record_torch(routing, numbers, slots)
    return slots


def of_places(place: Tensor, counts: Tensor, dtype: torch.dtype) -> Routing:
    """What :func:`permute` and :func:`unpermute` of rows of ``dtype`` need of a routing, from its places [T, k]."""
    own = refusal(place, 1, dtype) is None
    return Routing(counts, place.view(-1) if own else place.view(-1).argsort(), place, own)


def of_indices(num_rows: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, dtype: torch.dtype) -> Routing:
    """What :func:`permute` and :func:`unpermute` of rows of ``dtype`` need of a routing, from its parts.

    Indices are 32 bits wide only where our own kernels made them, which alone read such.
    """
    native = row_of_slot.dtype == torch.int32 and refusal(row_of_slot, 1, dtype) is None
    return Routing(num_rows, slot_of_row, row_of_slot, native)


def valid_rows(rows: Tensor, routing: Routing) -> Tensor:
    """The rows [S, H], those of no expert zero; a copy only where there may be some and no kernel skips them."""
    if routing.is_native or (
        rows.device.type == "cpu" and not trace.has_no_data(rows) and int(routing.num_rows) == rows.shape[0]
    ):
        return rows
    inside = torch.arange(rows.shape[0], device=rows.device) < routing.num_rows
    return torch.where(inside.unsqueeze(-1), rows, 0)


def _is_compiled(tensor: Tensor) -> bool:
    """Whether a compiler traces, by Dynamo or behind it."""
    return torch.compiler.is_compiling() or (type(tensor) is not Tensor and trace.is_traced(tensor))


def _record(name: str, why: str | None, *tensors: Tensor) -> None:
    """Tells a trace of our own kernel of that name, or of PyTorch's in its place, and why."""
    kernel = f"{kernels.NAME} ({name})" if why is None else "torch"
    reason = why if why and tensors[0].is_cuda else ""  # on a CPU nobody expects another
    trace.record(trace.KernelCall(kernel, reason, 0, nbytes(*tensors)))


def _record_torch(routing: Routing, source: Tensor, out: Tensor) -> None:
    """Tells a trace, if there is one, of a permutation by PyTorch's kernels."""
    if torch.compiler.is_compiling() or not trace.active():
        return
    if routing.is_native:
        why: str | None = f"{kernels.NAME} has no kernel for numbers of {source.dtype}"
    else:
        why = permute_refusal(routing.row_of_slot, 1, source.dtype)
    _record("", why or "the rows were sorted by PyTorch", source, out)


def _without_data(top_k_index: Tensor, num_experts: int, weights: Tensor | None) -> Routing:
    """What our own kernels would give, for ``explain``."""
    counts, order = (top_k_index.new_empty(n, dtype=torch.int32) for n in (num_experts + 1, top_k_index.numel()))
    scales = None if weights is None else order.new_empty(order.shape, dtype=torch.float32)
    return Routing(counts, order, torch.empty_like(top_k_index, dtype=torch.int32), True, scales)


def _traced(top_k_index: Tensor, num_experts: int) -> Routing:
    counts, order, place = torch.ops.fusible.route(top_k_index, num_experts)
    return Routing(counts, order, place, is_native=True)


def by_torch(top_k_index: Tensor, num_experts: int) -> Routing:
    """:func:`route` where our own kernels are not."""
    ids, slots = _narrow(top_k_index.reshape(-1), num_experts), top_k_index.shape[-1]
    ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    starts = torch.searchsorted(ids, experts, out_int32=True)
    counts = torch.cat((starts[1:] - starts[:-1], starts[-1:]))
    rows = torch.arange(order.shape[0], device=ids.device)
    place = torch.empty_like(order).scatter_(0, order, rows)
    return Routing(counts, order, place.view(-1, slots), is_native=False)


def _narrow(ids: Tensor, num_experts: int) -> Tensor:
    """The ids in few bits, which a radix sort of many on a GPU goes over one after the other."""
    large = ids.is_cuda and ids.shape[0] > _SORTED_AT_ONCE
    return ids.to(torch.int16) if large and num_experts < torch.iinfo(torch.int16).max else ids


def _sum_of_slots(rows: Tensor, place: Tensor) -> Tensor:
    tokens, slots = place.shape
    if not rows.is_cuda:  # without the gathered rows, whose memory costs a CPU ten times what the sum does
        return F.embedding_bag(place, rows, mode="sum")
    if slots == 1:
        return rows.index_select(0, place.view(-1))
    return rows.index_select(0, place.view(-1)).view(tokens, slots, rows.shape[1]).sum(1)
