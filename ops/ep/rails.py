"""The transport ``rails``: ranks of several hosts, of which a token reaches each host once. No host waits for sizes.

The ranks that have one number on their hosts are a rail: they gather one another's tokens by a collective of equal
parts. Inside a host these are tokens of the transport ``symmetric`` for the experts of the host. Its sums go back by an
all-to-all of equal parts, and are added in float32 in the order of hosts, and rounded once more. The backward is the
same: gradients of sums are gathered, gradients of tokens and of routing weights are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ...fuser.contract import tracing as trace
from ..kernels.problems.gemm import RowSlots
from ..routed.call import RoutedCall
from . import memory, messages
from .collective import peers_of
from .errors import CapacityError, PeerError
from .memory import Location
from .settings import Settings
from .symmetric import SymmetricTable, SymmetricTransport
from .transport import DispatchedRows, Exchange


class Hosts(NamedTuple):
    """The ranks of a process group as hosts of equally many.

    Attributes:
        number: of hosts; ``each``: the ranks of one.
        rank: the rank here.
    """

    number: int
    each: int
    rank: int

    @classmethod
    def of(cls, ranks: Sequence[Location], rank: int) -> Hosts:
        number = len({location.host for location in ranks})
        return cls(number, len(ranks) // number, rank)

    def refusal(self, ranks: Sequence[Location]) -> str | None:
        """The reason why rails cannot connect these ranks, or None."""
        names = [location.host for location in ranks]
        if self.number == 1:
            return f"is on host {names[0]}, as all ranks are; make the group with transport='symmetric'"
        of_each = [name for name in dict.fromkeys(names) for _ in range(self.each)]
        if names != of_each:
            return f"needs equally many ranks on each host, in consecutive order, but they are on {names}"
        return None

    @property
    def host(self) -> int:
        """The host of this rank."""
        return self.rank // self.each

    @property
    def here(self) -> list[int]:
        """The ranks of this host."""
        return [self.host * self.each + i for i in range(self.each)]

    @property
    def rail(self) -> list[int]:
        """The ranks with the number of this one, by host."""
        return list(range(self.rank % self.each, self.number * self.each, self.each))


class RailsTable(NamedTuple):
    """The rows of the slots of all ranks on this host's experts.

    Attributes:
        inner: the table of the transport inside the host, for the tokens of all ranks of the rail.
        row_of_slot: [T, k]: the part of it for this rank's tokens.
    """

    inner: SymmetricTable
    row_of_slot: Tensor

    @property
    def exchange(self) -> Exchange:
        """The exchange that it belongs to."""
        return self.inner.exchange

    @property
    def split_sizes(self) -> Tensor:
        """The rows of each local expert, int32 [E / R]."""
        return self.inner.split_sizes

    @property
    def num_rows(self) -> int:
        """The number of rows, Q."""
        return self.inner.num_rows


class Rail:
    """Collectives of equal parts between the ranks of a rail."""

    def __init__(self, process_group: dist.ProcessGroup, seconds: float) -> None:
        self._group, self._seconds, self.size = process_group, seconds, dist.get_world_size(process_group)

    def gathered(self, x: Tensor, named: str) -> Tensor:
        """[N * T, ...]: the tensors [T, ...] of each host, one after the other."""
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        self._run(partial(gather, out, x.contiguous()), named, x.is_cuda)
        return out

    def summed(self, x: Tensor, named: str) -> Tensor:
        """[T, ...]: the sum of all hosts' parts for this host, from [N * T, ...] on each."""
        parts = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._run(partial(dist.all_to_all_single, parts, x.contiguous()), named, x.is_cuda)
        first, *others = parts.chunk(self.size)
        total = first.to(torch.promote_types(x.dtype, torch.float32))
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def _run(self, collective: Callable[..., dist.Work], named: str, in_queue: bool) -> None:
        """Runs a collective: a GPU's queue waits for it, with the timeout of the process group, or else the host."""
        with peers_of(f"{named} between hosts (rail)"):
            work = collective(group=self._group, async_op=True)
            work.wait() if in_queue or not self._seconds else work.wait(timedelta(seconds=self._seconds))


class RailsTransport:
    """The transport ``rails``; see the module.

    Constructing it is collective.

    Attributes:
        inside: the transport of this host.
    """

    name = "rails"
    final: tuple[type[Exception], ...] = (PeerError, CapacityError)

    def __init__(self, settings: Settings, hosts: Hosts, process_group: dist.ProcessGroup) -> None:
        seconds, all_of_them = settings.timeout, dist.get_process_group_ranks(process_group)
        wait = timedelta(seconds=seconds) if seconds else None
        here, rail = (
            dist.new_group([all_of_them[rank] for rank in ranks], timeout=wait, use_local_synchronization=True)
            for ranks in (hosts.here, hosts.rail)
        )
        self._settings, self._hosts, self._rail = settings, hosts, Rail(rail, seconds)
        self.inside = SymmetricTransport(settings_inside(settings, hosts), here)
        self.inside.afterwards = "the other hosts wait for this one: make another group on all ranks"
        asked = self.inside.overlaps
        self.overlaps = asked._replace(reason="transport 'rails' moves rows beside products only if it is asked to")
        self.device = self.inside.device
        with torch.inference_mode(False):
            self._seen = [_Headers(hosts, self.device) for _ in range(settings.lanes)]
        self._forms: set[int] = set()

    def dispatch(self, exchange: Exchange, call: RoutedCall, fill: bool, beside: bool) -> DispatchedRows:
        named, first = exchange.named("dispatch"), self._hosts.host * self._settings.max_tokens
        flags, seen = messages.flags_of(call.needs_grad), self._seen[exchange.lane]
        headers = self._rail.gathered(_header(exchange.number, flags, call.x.device), named)
        wrong = seen.differ(headers.view(-1, 2))
        is_new = not call.x.is_cuda or messages.form_of(flags) not in self._forms  # messages of others have other sizes
        if is_new and not memory.in_capture():
            self.finish()
            seen.check(exchange.lane)
            self._forms.add(messages.form_of(flags))
        ids = self._of_this_host(self._rail.gathered(self._padded(call.top_k_index, -1), named))
        numbers = call.top_k_weights.to(torch.promote_types(call.top_k_weights.dtype, torch.float32))
        numbers = self._rail.gathered(self._padded(numbers), named).masked_fill_(wrong, torch.nan)
        everyone = self._rail.gathered(self._padded(call.x), named)
        of_this_host = replace(call, x=everyone, top_k_index=ids, top_k_weights=numbers)
        came = self.inside.dispatch(exchange, of_this_host, fill, beside)
        return came._replace(table=RailsTable(came.table, came.table.row_of_slot[first : first + call.x.shape[0]]))

    def _padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        """[max_tokens, ...] of [T, ...]."""
        missing = self._settings.max_tokens - x.shape[0]
        return nn.functional.pad(x, (0, 0, 0, missing), value=value) if missing else x

    def _of_this_host(self, ids: Tensor) -> Tensor:
        """Global ids as ids among the experts of this host; -1 for others."""
        experts = self._settings.num_experts // self._hosts.number
        return torch.where(ids.div(experts, rounding_mode="floor") == self._hosts.host, ids % experts, -1)

    def pull(self, tokens: Tensor, table: RailsTable, kind: str, fill: bool) -> Tensor:
        everyone = self._rail.gathered(self._padded(tokens), table.exchange.named(kind))
        return self.inside.pull(everyone, table.inner, kind, fill)

    def start_sum(
        self, rows: Tensor | None, table: RailsTable, kind: str, products_follow: bool = False
    ) -> Callable[[], Tensor]:
        of_this_host = self.inside.start_sum(rows, table.inner, kind, products_follow)
        return lambda: self._returned(of_this_host(), table, kind)

    def return_numbers(self, numbers: Tensor, table: RailsTable, dtype: torch.dtype, kind: str) -> Tensor:
        of_this_host = self.inside.return_numbers(numbers, table.inner, numbers.dtype, kind)
        return self._returned(of_this_host, table, kind).to(dtype)

    def _returned(self, sums: Tensor, table: RailsTable, kind: str) -> Tensor:
        """The sums of all hosts for the tokens of this rank."""
        return self._rail.summed(sums, table.exchange.named(kind))[: table.row_of_slot.shape[0]]

    def row_buffer(self, table: RailsTable) -> Tensor | None:
        return self.inside.row_buffer(table.inner)

    def row_slots(self, table: RailsTable) -> RowSlots | None:
        return self.inside.row_slots(table.inner)

    def statistics(self) -> Mapping[str, int]:
        return self.inside.statistics()

    def check(self) -> None:
        for lane, headers in enumerate(self._seen):
            headers.check(lane)
        try:
            self.inside.check()
        except (CapacityError, PeerError) as error:
            numbered = f"host {self._hosts.host}, its ranks from 0 to {self._hosts.each - 1}"
            raise type(error)(f"{numbered}: {error}") from error

    def finish(self) -> None:
        self.inside.finish()

    def reset(self) -> None:
        self.inside.reset()
        for headers in self._seen:
            headers.reset()

    def foresee(self, kind: str, *tensors: Tensor) -> None:
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        trace.record(trace.KernelCall(f"all_gather or all_to_all_single on the rail ({kind})", "", 0, moved))
        self.inside.foresee(kind, *tensors)


def _header(number: int, flags: int, on: torch.device) -> Tensor:
    """Two numbers as int64 [2], filled by the device: a copy would wait for it."""
    return torch.stack([torch.full((), each, dtype=torch.int64, device=on) for each in (number, flags)])


class _Headers:
    """The numbers of the exchange that each host is at, and the gradients that it wants; the first that differ stay."""

    def __init__(self, hosts: Hosts, on: torch.device) -> None:
        self._hosts = hosts
        self._state = torch.zeros(hosts.number, 2, dtype=torch.int64, device=on)
        self._report = memory.for_reports(on, self._state.numel())

    def differ(self, headers: Tensor) -> Tensor:
        """Whether some host has other numbers [N, 2] than this one, now or before: bool on the device."""
        mine = self._hosts.host
        before = (self._state != self._state[mine]).any()
        self._state.copy_(torch.where(before, self._state, headers))
        self._report.copy_(self._state.view(-1), non_blocking=True)
        return (self._state != self._state[mine]).any()

    def check(self, lane: int) -> None:
        """Raises what the device has seen.

        Raises:
            PeerError: a rank of the rail is at another exchange, or wants other gradients.
        """
        numbers = self._report.view(-1, 2).tolist()
        number, flags = numbers[self._hosts.host]
        named = Exchange(lane, number).named("dispatch")
        for rank, (its_number, its_flags) in zip(self._hosts.rail, numbers, strict=True):
            if its_number != number:
                raise PeerError(messages.other_step(rank, Exchange(lane, its_number).named("dispatch"), named))
            if its_flags != flags:
                raise PeerError(messages.other_wishes(rank, its_flags, flags, named))

    def reset(self) -> None:
        """Forgets what has been seen."""
        self._state.zero_()
        self._report.zero_()


def settings_inside(settings: Settings, hosts: Hosts) -> Settings:
    """The settings of the group inside a host, for its experts and the tokens of all hosts.

    As many rows are on a rank as with any transport: of N times the tokens, one Nth has an expert here.
    """
    return settings._replace(
        num_experts=settings.num_experts // hosts.number,
        max_tokens=settings.max_tokens * hosts.number,
        capacity=settings.rows(hosts.number * hosts.each) or 0,
        combine="exact",
        transport="symmetric",
        overlap_dispatch=settings.overlap_dispatch or 0,
        overlap_combine=bool(settings.overlap_combine),
    )
