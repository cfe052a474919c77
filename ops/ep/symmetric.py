"""The transport ``symmetric``: ranks of one host read one another's rows, by our own kernels. No host waits.

Every rank has the ids of all, and sorts them as one GPU would that has the tokens of all. So it knows where every row
is without asking, reads the tokens of its experts where they are, and sums rows from where they are; with
``combine="reduced"`` it sends each token's rank the sum of its rows instead. Ranks meet before what others have written
is read, and no region is written again before they have met after it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ...fuser.contract import tracing as trace
from ..kernels.hopper import arrivals as waiting
from ..kernels.hopper import peers as kernels
from ..kernels.hopper import permute as sorting
from ..kernels.problems.gemm import RowSlots
from ..routed.call import RoutedCall
from . import float8_rows, memory, messages
from .barrier import barrier
from .errors import CapacityError, PeerError
from .memory import SharedMemory
from .overlap import Overlaps, multiprocessors_beside
from .settings import Settings
from .transport import DispatchedRows, Exchange

_KINDS = ("dispatch", "combine", "combine backward", "dispatch backward", "dispatch backward (weights)", "another use")
_WANTED_BIT = 8  # of a kind, where the flags of the gradients wanted begin
_ALIGNMENT = 1024
_NUMBER_BYTES = 8
_FAILURE = kernels.LaneReport._fields.index("failure")


class SymmetricTable(NamedTuple):
    """The rows of the slots of all ranks.

    Attributes:
        slots: the slots of all ranks, [R * T, k] with T = ``max_tokens``.
        row_of_slot: int32 [T, k]: the rows of this rank's slots.
        wanted: the gradients that the backward will compute.
        slot_of_row: int32 [R * T * k]: the slot of each row of all ranks, if rows are sent to slots.
    """

    exchange: Exchange
    split_sizes: Tensor
    slots: kernels.Slots
    row_of_slot: Tensor
    num_rows: int
    wanted: frozenset[str]
    slot_of_row: Tensor | None = None

    @property
    def mine(self) -> kernels.Slots:
        """The slots of this rank's tokens."""
        return kernels.Slots(self.row_of_slot, self.slots.firsts, self.slots.capacity)


class Regions(NamedTuple):
    """Byte offsets of the parts of a lane's buffer."""

    signals: int
    ids: int
    slot_numbers: int
    tokens: int
    row_numbers: int
    rows: int
    slots: int
    parts: int
    end: int

    @classmethod
    def of(cls, settings: Settings, overlaps: Overlaps, ranks: int, capacity: int, first: int) -> Regions:
        """The regions of a lane that starts at byte ``first``."""
        slots, row, tokens = settings.slots, settings.hidden * settings.dtype.itemsize, settings.max_tokens
        sent = max(row, 2 * float8_rows.width(settings.hidden))  # of few columns, more in 8 bits, as it is padded
        reduced = settings.combine == "reduced"
        sizes = (
            *(2 * ranks * kernels.SIGNAL_BYTES, 4 * ranks * slots, _NUMBER_BYTES * ranks * slots),
            *(tokens * sent, capacity * _NUMBER_BYTES, 0 if reduced else capacity * row),
            *(slots * row if overlaps.combine else 0, ranks * tokens * row if reduced else 0),
        )
        return cls(*accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=first))


class SymmetricLane:
    """The buffers of one lane, and the regions read since the last meeting of ranks."""

    def __init__(self, settings: Settings, regions: Regions, shared: SharedMemory, rank: int) -> None:
        on = shared.bytes.device
        self._settings, self.regions, self._shared = settings, regions, shared
        state = torch.zeros(kernels.STATE_BYTES, dtype=torch.uint8, device=on)
        report = memory.for_reports(on, len(kernels.LaneReport._fields))
        self.launch = kernels.LaneLaunch(on.index or 0, rank, shared.addresses, state, report)
        self._read: set[str] = set()

    def view(self, region: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A view of the first elements of a region of this rank."""
        first, count = getattr(self.regions, region), torch.Size(shape).numel()
        return self._shared.bytes[first : first + count * dtype.itemsize].view(dtype).view(shape)

    def meet(
        self, exchange: Exchange, kind: str, wanted: frozenset[str], published: kernels.Published | None = None
    ) -> None:
        """Waits on the device until all ranks get here. Each rank then sees everything that others wrote before."""
        code = _KINDS.index(kind) | messages.flags_of(wanted) << _WANTED_BIT
        signals, timeout = self.regions.signals, self._settings.timeout
        kernels.publish(self.launch, exchange.number, code, signals, timeout, published)
        self._read.clear()

    def reads(self, *regions: str) -> None:
        """Notes that regions of other ranks are read."""
        self._read.update(regions)

    def will_write(self, region: str, exchange: Exchange) -> None:
        """Prepares a write to a region: ranks meet first if others may still be reading it. Call it before writing."""
        if region in self._read:
            self.meet(exchange, _KINDS[-1], frozenset())

    def report(self) -> kernels.LaneReport:
        """The report that kernels have written so far."""
        return kernels.LaneReport(*self.launch.report.tolist())

    def reset(self) -> None:
        """Resets the lane to its initial state. No rank may use it meanwhile."""
        size = 2 * len(self.launch.buffers) * kernels.SIGNAL_BYTES
        self.view("signals", torch.uint8, size).zero_()
        self.launch.state[: kernels.STATE_OF_SIGNALS].zero_()
        self.launch.report[: kernels.LaneReport._fields.index("required")].zero_()
        self._read.clear()


class SymmetricTransport:
    """The transport ``symmetric``; see the module."""

    name = "symmetric"
    final: tuple[type[Exception], ...] = (PeerError,)
    afterwards = "group.reset() on all ranks ends this state"

    def __init__(self, settings: Settings, process_group: dist.ProcessGroup) -> None:
        on, capacity = memory.device(), settings.rows(dist.get_world_size(process_group))
        assert on is not None
        assert capacity is not None
        self._settings, self._capacity, self._device = settings, capacity, on
        self._rank, self._ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.overlaps = Overlaps.of(settings, self._ranks)
        regions: list[Regions] = []
        for _ in range(settings.lanes):
            first = regions[-1].end if regions else 0
            regions.append(Regions.of(settings, self.overlaps, self._ranks, capacity, first))
        self._beside: torch.cuda.Stream | None = None
        self._multiprocessors = memory.multiprocessors(on)
        with torch.inference_mode(False):
            shared = memory.allocate(regions[-1].end, on, process_group)
            self._lanes = [SymmetricLane(settings, each, shared, self._rank) for each in regions]
        self.reset()
        self.finish()
        barrier(process_group)

    @staticmethod
    def refusal(settings: Settings, ranks: int) -> str | None:
        """The reason why the transport cannot serve such a group on this rank, or None."""
        on = memory.device()
        if memory.in_capture():
            return "captures a CUDA graph; make the group, and run a step, before that"
        index = None if on is None else on.index or 0
        return kernels.refusal(index, settings.num_experts, ranks, settings.dtype) or memory.refusal()

    @property
    def device(self) -> torch.device:
        """The device that tokens must be on."""
        return self._device

    def dispatch(self, exchange: Exchange, call: RoutedCall, fill: bool, beside: bool) -> DispatchedRows:
        lane, s = self._lanes[exchange.lane], self._settings
        ids, numbers = call.top_k_index.contiguous(), call.top_k_weights.contiguous()
        numbers = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
        self._write_tokens(lane, call.x, exchange)
        at = lane.regions.ids, lane.regions.slot_numbers
        published = kernels.Published(ids, numbers, s.slots, s.num_experts, *at)
        lane.meet(exchange, "dispatch", call.needs_grad, published)
        lane.reads("tokens")
        table, slot_of_row = self._table(lane, exchange, ids.shape[0], call.needs_grad)
        scales = numbers.new_empty(self._capacity)
        kernels.numbers_to_rows(lane.launch, exchange.number, table.slots, lane.regions.slot_numbers, scales)
        if not (beside and self.overlaps.dispatch):
            return DispatchedRows(table, self._pulled(lane, table, call.x.shape[1], fill), scales)
        counters = waiting.counters(self._capacity, table.split_sizes.shape[0], self._device)
        arriving = kernels.RowsArriving(slot_of_row, counters, self.overlaps.dispatch)
        return DispatchedRows(table, self._pulled(lane, table, call.x.shape[1], fill, arriving), scales, arriving)

    def _write_tokens(self, lane: SymmetricLane, tokens: Tensor, exchange: Exchange) -> None:
        lane.will_write("tokens", exchange)
        lane.view("tokens", tokens.dtype, *tokens.shape).copy_(tokens)

    def _table(
        self, lane: SymmetricLane, exchange: Exchange, tokens: int, wanted: frozenset[str]
    ) -> tuple[SymmetricTable, Tensor]:
        """The table from the ids of all ranks, and the slot of each row of all ranks."""
        s = self._settings
        ids = lane.view("ids", torch.int32, self._ranks * s.max_tokens, s.top_k)
        tokens_per_expert, slot_of_row, row_of_slot, _ = sorting.route(ids, s.num_experts, None)
        fails = s.overflow == "raise"
        firsts, sizes = kernels.divide_rows(lane.launch, exchange.number, tokens_per_expert, self._capacity, fails)
        slots = kernels.Slots(row_of_slot, firsts, self._capacity)
        first = self._rank * s.max_tokens
        mine = row_of_slot[first : first + tokens]
        sent = slot_of_row if self.overlaps.combine else None
        return SymmetricTable(exchange, sizes, slots, mine, self._capacity, wanted, sent), slot_of_row

    def _pulled(
        self,
        lane: SymmetricLane,
        table: SymmetricTable,
        columns: int,
        fill: bool,
        arriving: kernels.RowsArriving | None = None,
    ) -> Tensor:
        """The rows, pulled from published tokens of so many columns."""
        rows = torch.empty(self._capacity, columns, dtype=self._settings.dtype, device=self._device)
        moved = lane.launch, table.exchange.number, table.slots, lane.regions.tokens, rows, fill
        kernels.pull(*moved) if arriving is None else kernels.pull_blocks(*moved, arriving)
        return rows

    def pull(self, tokens: Tensor, table: SymmetricTable, kind: str, fill: bool) -> Tensor:
        lane = self._lanes[table.exchange.lane]
        self._write_tokens(lane, tokens, table.exchange)
        lane.meet(table.exchange, kind, table.wanted)
        lane.reads("tokens")
        rows = self._pulled(lane, table, tokens.shape[1], fill)
        if not table.wanted & messages.GRADIENTS:  # the last move of a backward; a graph replayed next asks no host
            lane.will_write("tokens", table.exchange)
        return rows

    def start_sum(
        self, rows: Tensor | None, table: SymmetricTable, kind: str, products_follow: bool = False
    ) -> Callable[[], Tensor]:
        lane, exchange = self._lanes[table.exchange.lane], table.exchange
        if self._settings.combine == "reduced":
            assert rows is not None  # no slots
            return self._start_reduced(lane, rows, table, kind, products_follow)
        at_slots = kind == "combine" and table.slot_of_row is not None
        if rows is not None:
            slots = self.row_slots(table) if at_slots else None
            self._bring(lane, rows if rows.stride(-1) == 1 else rows.contiguous(), table, slots)
        lane.meet(exchange, kind, table.wanted)
        if products_follow and (blocks := self._blocks_beside(table)):
            return self._sum_beside(lane, table, blocks)
        return lambda: self._sum(lane, table, self._new_sums(table), at_slots=at_slots)

    def _start_reduced(
        self, lane: SymmetricLane, rows: Tensor, table: SymmetricTable, kind: str, products_follow: bool
    ) -> Callable[[], Tensor]:
        """Sends the sums of this rank's rows. Ranks meet when the returned function is called: the sums may be on their
        way beside products until then.
        """
        exchange, at = table.exchange, lane.regions.parts
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        lane.will_write("parts", exchange)
        blocks = self._blocks_beside(table) if products_follow else 0
        push = partial(kernels.push_sums, lane.launch, exchange.number, rows, table.slots, at, blocks)
        join = self._run_beside(push) if blocks else None
        if join is None:
            push()

        def summed() -> Tensor:
            if join is not None:
                join()
            lane.meet(exchange, kind, table.wanted)
            lane.reads("parts")
            sums = self._new_sums(table)
            kernels.sum_parts(lane.launch, exchange.number, table.mine, at, sums)
            return sums

        return summed

    def _bring(self, lane: SymmetricLane, rows: Tensor, table: SymmetricTable, slots: RowSlots | None) -> None:
        """Brings rows to where they are summed from, unless they are there."""
        if slots is not None:
            kernels.send_rows(rows, slots)
        elif rows.data_ptr() != lane.launch.buffers[self._rank] + lane.regions.rows:
            lane.will_write("rows", table.exchange)
            kernels.stage_rows(lane.launch, table.exchange.number, rows, table.slots, lane.regions.rows)

    def _blocks_beside(self, table: SymmetricTable) -> int:
        """The number of multiprocessors that sum while the others multiply. It may differ between ranks."""
        s = self._settings
        if not self._multiprocessors:
            return 0
        summed = table.row_of_slot.numel() * s.hidden * s.dtype.itemsize
        return multiprocessors_beside(s.overlap, self._multiprocessors, summed)

    def row_slots(self, table: SymmetricTable) -> RowSlots | None:
        if table.slot_of_row is None:
            return None
        lane = self._lanes[table.exchange.lane]  # ranks have met in the dispatch since these slots were read
        launch, ends = lane.launch, (table.slots.firsts, self._settings.slots, lane.regions.slots)
        return RowSlots(launch.rank, launch.buffers, launch.state, table.slot_of_row, *ends)

    def _new_sums(self, table: SymmetricTable) -> Tensor:
        s = self._settings
        return torch.empty(table.row_of_slot.shape[0], s.hidden, dtype=s.dtype, device=self._device)

    def _sum(
        self, lane: SymmetricLane, table: SymmetricTable, sums: Tensor, blocks: int = 0, at_slots: bool = False
    ) -> Tensor:
        """Sums ready rows into ``sums``: rows of all ranks, or rows that were sent to this rank's slots."""
        if not at_slots:
            lane.reads("rows")
        at = lane.regions.slots if at_slots else lane.regions.rows
        kernels.pull_sum(lane.launch, table.exchange.number, table.mine, at, sums, blocks, at_slots)
        return sums

    def _sum_beside(self, lane: SymmetricLane, table: SymmetricTable, blocks: int) -> Callable[[], Tensor]:
        """Sums on ``blocks`` multiprocessors in parallel with the next work of the current stream."""
        sums = self._new_sums(table)
        join = self._run_beside(lambda: self._sum(lane, table, sums, blocks))

        def joined() -> Tensor:
            join()
            lane.reads("rows")
            return sums

        return joined

    def _run_beside(self, launch: Callable[[], object]) -> Callable[[], None]:
        """Runs a launch in parallel with the next work of the current stream; returns a function that joins the two."""
        if self._beside is None:  # high priority, so that it starts before later launches
            self._beside = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            launch()
        return partial(self._join, self._beside, launch)

    def _join(self, beside: torch.cuda.Stream, launch: Callable[[], object]) -> None:
        """Lets the current stream wait for the one beside it; ``launch`` keeps what it reads until then."""
        torch.cuda.current_stream(self._device).wait_stream(beside)

    def return_numbers(self, numbers: Tensor, table: SymmetricTable, dtype: torch.dtype, kind: str) -> Tensor:
        lane, exchange = self._lanes[table.exchange.lane], table.exchange
        lane.will_write("row_numbers", exchange)
        lane.view("row_numbers", numbers.dtype, *numbers.shape).copy_(numbers)
        lane.meet(exchange, f"{kind} (weights)", table.wanted)
        lane.reads("row_numbers")
        out = torch.empty_like(table.row_of_slot, dtype=numbers.dtype)
        kernels.pull_numbers(lane.launch, exchange.number, table.mine, lane.regions.row_numbers, out)
        return out.to(dtype)

    def row_buffer(self, table: SymmetricTable) -> Tensor | None:
        s = self._settings
        if s.combine == "reduced":  # others do not read rows
            return None
        return self._lanes[table.exchange.lane].view("rows", s.dtype, self._capacity, s.hidden)

    def statistics(self) -> Mapping[str, int]:
        self.finish()
        reports = [lane.report() for lane in self._lanes]
        return {"required": max(r.required for r in reports), "dropped": sum(r.dropped for r in reports)}

    def check(self) -> None:
        for number, lane in enumerate(self._lanes):
            if lane.launch.report.tolist()[_FAILURE]:
                raise self._error(number, lane.report())

    def _error(self, lane: int, report: kernels.LaneReport) -> Exception:
        exchange, kind = Exchange(lane, report.exchange), _kind_of(report.kind)
        named = exchange.named(kind)
        if report.failure == kernels.OVERFLOW:
            cures = f"or 'worst', or with overflow='drop'; {self.afterwards}"
            numbers = report.peer, report.seen, self._capacity
            return CapacityError(messages.overflow(self._settings, exchange.named("dispatch"), *numbers, cures))
        if report.failure == kernels.LATE:
            came = [str(rank) for rank in range(self._ranks) if report.came >> rank & 1]
            return PeerError(
                f"rank {report.peer} did not take part in {named} within {self._settings.timeout} s; of "
                f"{self._ranks} ranks, {', '.join(came)} did"
            )
        theirs = _kind_of(report.kind_seen)
        if theirs != kind:
            return PeerError(messages.other_step(report.peer, f"{theirs} on lane {lane}", named))
        flags = report.kind_seen >> _WANTED_BIT, report.kind >> _WANTED_BIT
        return PeerError(messages.other_wishes(report.peer, *flags, named))

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def reset(self) -> None:
        for lane in self._lanes:
            lane.reset()

    def foresee(self, kind: str, *tensors: Tensor) -> None:
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        trace.record(trace.KernelCall(f"{kernels.NAME} (between ranks: {kind})", "", 0, moved))


def _kind_of(code: int) -> str:
    return _KINDS[code & ((1 << _WANTED_BIT) - 1)]
