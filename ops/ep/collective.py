"""The transport ``collective``: ``all_to_all_single`` of the process group, on any backend.

It is the reference implementation.

A rank sorts its slots by expert, and thereby by owner, and sends each owner its rows. They arrive by rank, then expert,
and the owner brings them into the order of experts. The way back has the same steps in reverse. One gather of counts,
for which the host waits, gives the sizes of all messages.

A backward keeps all that depends on the ids in tensors, sizes too: a checkpoint that computes a forward again replaces
tensors alone. With a fixed capacity none of their shapes depends on the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ...fuser.contract import tracing as trace
from ..kernels.doors import routing as permutation
from ..kernels.doors.routing import Routing
from ..routed.call import RoutedCall
from . import memory, messages
from .errors import CapacityError, PeerError
from .overlap import Overlaps
from .settings import Settings
from .transport import DispatchedRows, Exchange

_HEADER = 5  # numbers in front of the counts: group, lane, exchange, number of tokens, gradients wanted


class Arrivals(NamedTuple):
    """The rows of this rank's experts, as they arrive from all ranks.

    Attributes:
        from_rank: int64 [R], on the host: the number from each rank.
        order: int64 [Q]: the position at which each row arrives; 0 in the tail.
        split_sizes: int32 [E / R].
    """

    from_rank: Tensor
    order: Tensor
    split_sizes: Tensor

    @property
    def in_place(self) -> Tensor:
        """The order without its tail."""
        return self.order[: _total(self.from_rank)]


class Sums(NamedTuple):
    """The sums of a token's rows on each owner (``combine="reduced"``).

    Attributes:
        here: sums the rows of this rank's experts for each (rank, token) that has rows; then a tail.
        back: adds the sums that come back, for each token of this rank.
        to_rank, from_rank: int64 [R], on the host: the number of sums sent to each rank, and received from it.
    """

    here: Routing
    back: Routing
    to_rank: Tensor
    from_rank: Tensor


class CollectiveTable(NamedTuple):
    """The slots of this rank in the order in which they travel, and the rows that it owns.

    Attributes:
        routing: sorts the slots of this rank by expert.
        to_rank: int64 [R], on the host: the number of its rows sent to each rank.
    """

    exchange: Exchange
    routing: Routing
    to_rank: Tensor
    arrivals: Arrivals
    sums: Sums | None

    @property
    def split_sizes(self) -> Tensor:
        """The rows of each local expert, int32 [E / R]."""
        return self.arrivals.split_sizes

    @property
    def row_of_slot(self) -> Tensor:
        """The row of each slot [T, k], among the rows of this rank's slots."""
        return self.routing.row_of_slot

    @property
    def num_rows(self) -> int:
        """The number of rows, Q."""
        return self.arrivals.order.shape[0]


class CollectiveTransport:
    """The transport ``collective``; see the module.

    Args:
        number: of its group. Messages carry it, because those of another group of the process group could fit.
    """

    name = "collective"
    final: tuple[type[Exception], ...] = (PeerError,)
    overlaps = Overlaps()

    def __init__(self, settings: Settings, process_group: dist.ProcessGroup, number: int = 0) -> None:
        self._settings, self._group, self._number = settings, process_group, number
        self._rank, self._ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._capacity = settings.rows(self._ranks)
        self._required = self._dropped = 0
        self._buffers: dict[int, Tensor] = {}

    def dispatch(self, exchange: Exchange, call: RoutedCall, fill: bool, beside: bool) -> DispatchedRows:
        table = self._route(exchange, call.top_k_index, call.needs_grad)
        rows = self.pull(call.x, table, "dispatch", fill)
        weights = permutation.scales_of(table.routing, call.top_k_weights)[: _total(table.to_rank)]
        return DispatchedRows(table, rows, self._arrived(weights, table, "dispatch", fill=True))

    def _route(self, exchange: Exchange, top_k_index: Tensor, wanted: frozenset[str]) -> CollectiveTable:
        if memory.in_capture():
            raise RuntimeError(
                f"{exchange.named('dispatch')}: transport 'collective' waits for the host, which a CUDA graph cannot "
                "capture; make the group with transport='symmetric'"
            )
        experts = self._settings.num_experts
        ids = torch.where((top_k_index >= 0) & (top_k_index < experts), top_k_index, experts)
        routing = permutation.route(ids, experts, self._settings.dtype)
        counts = self._gathered_counts(exchange, routing, top_k_index.shape[0], wanted)
        kept = self._kept(exchange, counts)
        if kept is not counts:
            ids = _without_dropped(ids, routing, kept[self._rank].to(ids.device))
            routing = permutation.route(ids, experts, self._settings.dtype)
        by_owner = kept.view(self._ranks, self._ranks, -1)
        arrivals = _arrivals(by_owner[:, self._rank], self._capacity, ids.device)
        table = CollectiveTable(exchange, routing, by_owner[self._rank].sum(1), arrivals, None)
        return table if self._settings.combine == "exact" else table._replace(sums=self._sums(table))

    def _gathered_counts(self, exchange: Exchange, routing: Routing, tokens: int, wanted: frozenset[str]) -> Tensor:
        """The rows that each rank has for each expert, [R, E] on the host."""
        header, sizes = [self._number, *exchange, tokens, messages.flags_of(wanted)], routing.split_sizes
        mine = torch.cat((torch.tensor(header, dtype=torch.int32, device=sizes.device), sizes))
        gathered = mine.new_empty(self._ranks * mine.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        seconds = 0 if mine.is_cuda else self._settings.timeout
        self._started(partial(gather, gathered, mine), exchange.named("dispatch"), seconds)()
        table = gathered.view(self._ranks, -1).cpu()
        self._compare(exchange, table[:, :_HEADER].tolist())
        return table[:, _HEADER:].long()

    def _compare(self, exchange: Exchange, headers: Sequence[Sequence[int]]) -> None:
        """Raises an error if ranks make different calls."""
        named, mine = exchange.named("dispatch"), headers[self._rank][-1]
        for rank, (group, lane, number, _, flags) in enumerate(headers):
            theirs = Exchange(lane, number)
            if group != self._number:
                raise PeerError(messages.other_step(rank, f"{theirs.named('dispatch')} of another Group", named))
            if theirs != exchange:
                raise PeerError(messages.other_step(rank, theirs.named("dispatch"), named))
            if flags != mine:
                raise PeerError(messages.other_wishes(rank, flags, mine, named))

    def _kept(self, exchange: Exchange, counts: Tensor) -> Tensor:
        """The counts, without rows that exceed their owner's capacity."""
        owned = counts.view(self._ranks, self._ranks, -1).sum((0, 2))
        required, owner = (int(each) for each in owned.max(0))
        self._required = max(self._required, required)
        if self._capacity is None or required <= self._capacity:
            return counts
        if self._settings.overflow == "raise":
            numbers = owner, required, self._capacity
            cures = "'worst' or 'exact', or with overflow='drop'"
            raise CapacityError(messages.overflow(self._settings, exchange.named("dispatch"), *numbers, cures))
        kept = _clipped(counts.view(self._ranks, self._ranks, -1), self._capacity).view_as(counts)
        self._dropped += int(counts.sum() - kept.sum())
        return kept

    def _sums(self, table: CollectiveTable) -> Sums:
        """The rows of each token on each rank, computed from the slots, which are sent like rows."""
        slots = table.routing.slot_of_row[: _total(table.to_rank)].to(torch.int64)
        kind = table.exchange.named("dispatch")
        arrived = self._exchanged(slots, table.to_rank, table.arrivals.from_rank, kind)()
        sources = torch.repeat_interleave(table.arrivals.from_rank).to(slots.device)
        here, to_rank = _by_token(arrived, sources, table.arrivals.in_place, self._settings, self._ranks)
        owners = torch.repeat_interleave(table.to_rank).to(slots.device)
        back, from_rank = _sums_by_rank(slots, owners, table.routing.row_of_slot.shape, self._ranks)
        return Sums(here, back, to_rank, from_rank)

    def pull(self, tokens: Tensor, table: CollectiveTable, kind: str, fill: bool) -> Tensor:
        spread = permutation.permute(tokens, table.routing, fill=False)[: _total(table.to_rank)]
        return self._arrived(spread, table, kind, fill)

    def _arrived(self, mine: Tensor, table: CollectiveTable, kind: str, fill: bool) -> Tensor:
        """Sends rows or numbers of this rank's slots; returns the Q received ones, by expert."""
        arrivals, named = table.arrivals, table.exchange.named(kind)
        arrived = self._exchanged(mine, table.to_rank, arrivals.from_rank, named)()
        rows = mine.new_empty(table.num_rows, *mine.shape[1:])
        count = arrived.shape[0]
        torch.index_select(arrived, 0, arrivals.order[:count], out=rows[:count])
        if fill:
            rows[count:].zero_()
        return rows

    def start_sum(
        self, rows: Tensor | None, table: CollectiveTable, kind: str, products_follow: bool = False
    ) -> Callable[[], Tensor]:
        assert rows is not None  # no slots
        if table.sums is None:
            arrived = self._start_returning(rows, table, kind)
            return lambda: permutation.unpermute(arrived(), table.routing)
        sums = table.sums
        here = sums.here._replace(row_of_slot=sums.here.row_of_slot[: _total(sums.to_rank)])
        mine = permutation.unpermute(_with_zero(rows[: _total(table.arrivals.from_rank)]), here)
        back = self._exchanged(mine, sums.to_rank, sums.from_rank, table.exchange.named(kind))
        return lambda: permutation.unpermute(_with_zero(back()), sums.back)

    def return_numbers(self, numbers: Tensor, table: CollectiveTable, dtype: torch.dtype, kind: str) -> Tensor:
        return permutation.by_slot(self._start_returning(numbers, table, kind)(), table.routing, dtype)

    def _start_returning(self, rows: Tensor, table: CollectiveTable, kind: str) -> Callable[[], Tensor]:
        """Sends Q rows or numbers back; the result has one for each slot of this rank, zero for slots without an
        expert.
        """
        order, slots = table.arrivals.in_place, table.routing.slot_of_row.shape[0]
        leaving = rows.new_empty(order.shape[0], *rows.shape[1:])
        leaving.index_copy_(0, order, rows[: order.shape[0]])
        back, sent = rows.new_empty(slots, *rows.shape[1:]), _total(table.to_rank)
        back[sent:].zero_()
        sizes = table.arrivals.from_rank, table.to_rank
        arrived = self._exchange(back[:sent], leaving, *sizes, table.exchange.named(kind))

        def returned() -> Tensor:
            arrived()
            return back

        return returned

    def row_buffer(self, table: CollectiveTable) -> Tensor | None:
        if not self.lends(table):
            return None
        lane, rows = table.exchange.lane, table.num_rows
        buffer = self._buffers.get(lane)
        if buffer is None or buffer.shape[0] < rows:
            with torch.inference_mode(False):  # tensors made in inference mode may only be written there
                buffer = self._buffers[lane] = torch.empty(
                    rows, self._settings.hidden, dtype=self._settings.dtype, device=table.split_sizes.device
                )
        return buffer[:rows]

    def row_slots(self, table: CollectiveTable) -> None:
        """None: ranks do not write one another's memory."""

    def lends(self, table: CollectiveTable) -> bool:
        """Whether it has memory for rows: if our own kernels run, which write there at no cost."""
        return table.routing.is_native

    def statistics(self) -> Mapping[str, int]:
        return {"required": self._required, "dropped": self._dropped}

    def check(self) -> None:
        """Does nothing: the host has waited for everything that can fail."""

    def finish(self) -> None:
        """Does nothing: a collective ends when all ranks have done their part."""

    def reset(self) -> None:
        """Does nothing: an abandoned exchange leaves no state."""

    def foresee(self, kind: str, *tensors: Tensor) -> None:
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        trace.record(trace.KernelCall(f"all_to_all_single ({kind})", "", 0, moved))

    def _exchanged(self, rows: Tensor, to_rank: Tensor, from_rank: Tensor, named: str) -> Callable[[], Tensor]:
        """Starts an exchange of rows; returns a function that waits for the received ones."""
        arrived = rows.new_empty(_total(from_rank), *rows.shape[1:])
        wait = self._exchange(arrived, rows, to_rank, from_rank, named)

        def there() -> Tensor:
            wait()
            return arrived

        return there

    def _exchange(
        self, arrived: Tensor, rows: Tensor, to_rank: Tensor, from_rank: Tensor, named: str
    ) -> Callable[[], None]:
        """Starts an exchange of ``to_rank`` and ``from_rank`` rows, in the order of ranks; returns a function that
        waits.
        """
        sizes, leaving = (from_rank.tolist(), to_rank.tolist()), rows.contiguous()
        move = partial(dist.all_to_all_single, arrived, leaving, *sizes)
        return self._started(move, named, seconds=0 if rows.is_cuda else self._settings.timeout)

    def _started(self, collective: Callable[..., Any], named: str, seconds: float) -> Callable[[], None]:
        """Starts a collective; returns a function that waits for it: on a host with the timeout, in a device's queue
        without.

        NCCL has the timeout of the process group, and a watchdog.
        """
        with peers_of(named):
            work = collective(group=self._group, async_op=True)

        def wait() -> None:
            with peers_of(named):
                work.wait(timedelta(seconds=seconds)) if seconds else work.wait()

        return wait


@contextmanager
def peers_of(named: str) -> Iterator[None]:
    """Adds to an error in the body which exchange's collective did not end."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"a rank did not take part in {named}: {error}") from error


def _total(sizes: Tensor) -> int:
    """The sum of sizes on the host."""
    return int(sizes.sum())


def _clipped(counts: Tensor, capacity: int) -> Tensor:
    """The counts [R, R, E / R] by rank, owner and expert, without rows past the capacity, by expert, then rank."""
    in_order = counts.permute(1, 2, 0).flatten(1)
    before = in_order.cumsum(1) - in_order
    kept = torch.minimum(in_order, (capacity - before).clamp(min=0))
    ranks = counts.shape[0]
    return kept.view(ranks, -1, ranks).permute(2, 0, 1).contiguous()


def _without_dropped(ids: Tensor, routing: Routing, kept: Tensor) -> Tensor:
    """Expert ids after dropping: each expert keeps its first ``kept`` slots, the rest get "no expert"."""
    experts = kept.shape[0]
    counts = routing.split_sizes.long()
    starts = torch.cat((counts.cumsum(0) - counts, counts.sum(0, keepdim=True)))
    ends = torch.cat((starts[:-1] + kept, starts[-1:] + ids.numel()))
    index = ids.long()
    return torch.where(routing.row_of_slot.long() < ends[index], ids, experts)


def _arrivals(counts: Tensor, capacity: int | None, device: torch.device) -> Arrivals:
    """The arrivals for counts [R, E / R] of rows, in ``capacity`` rows, or as many as arrive if it is None."""
    starts = counts.flatten().cumsum(0).view_as(counts) - counts  # they come by rank, then expert
    chunks, total = counts.t().flatten(), int(counts.sum())
    shift = starts.t().flatten() - (chunks.cumsum(0) - chunks)
    sizes, shift = chunks.to(device), shift.to(device)
    order = sizes.new_zeros(total if capacity is None else capacity)
    shifts, rows = torch.repeat_interleave(shift, sizes, output_size=total), torch.arange(total, device=device)
    torch.add(shifts, rows, out=order[:total])
    return Arrivals(counts.sum(1), order, counts.sum(0).to(device, torch.int32))


def _by_token(slots: Tensor, sources: Tensor, order: Tensor, settings: Settings, ranks: int) -> tuple[Routing, Tensor]:
    """Groups rows by (rank, token), in the order of slots; also returns the number of tokens of each rank here.

    With a fixed capacity, the number of lines is its maximum; lines past the tokens add nothing.

    Args:
        slots, sources: the slot of each row in the order of arrival, and its rank.
        order: for each row of the experts, the position at which it arrives.
    """
    k = settings.top_k
    by_slot, arrival = torch.sort(sources * (settings.max_tokens * k) + slots)
    tokens, line, counts = torch.unique_consecutive(by_slot // k, return_inverse=True, return_counts=True)
    row_of_arrival = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    column = torch.arange(slots.shape[0], device=slots.device) - (counts.cumsum(0) - counts)[line]
    capacity = settings.rows(ranks)
    lines = tokens.shape[0] if capacity is None else min(capacity, ranks * settings.max_tokens)
    rows = order.new_full((lines, k), order.shape[0])
    rows[line, column] = row_of_arrival[arrival]
    of_rank = torch.bincount(tokens // settings.max_tokens, minlength=ranks)
    return _sums_of(rows, order.shape[0]), of_rank.cpu()


def _sums_by_rank(slots: Tensor, owners: Tensor, shape: torch.Size, ranks: int) -> tuple[Routing, Tensor]:
    """The positions of the sums of a rank's tokens, by owner, then token; also returns the number from each owner."""
    tokens, k = shape
    there = slots.new_zeros(ranks, tokens, dtype=torch.bool)
    there[owners, slots // max(1, k)] = True
    order = there.flatten().cumsum(0).view_as(there) - 1
    from_rank = there.sum(1).cpu()
    count = _total(from_rank)
    rows = torch.where(there, order, count).t().contiguous()
    return _sums_of(rows, count), from_rank


def _sums_of(rows: Tensor, count: int) -> Routing:
    """A routing that sums the rows of each line; a row index of ``count`` or more adds nothing."""
    return Routing(rows.new_tensor([count], dtype=torch.int32), rows.flatten(), rows, is_native=False)


def _with_zero(rows: Tensor) -> Tensor:
    """The rows, and after them one of zeros."""
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
