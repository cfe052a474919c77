"""Our own CUDA kernels that move rows between GPUs which read one another's memory (``csrc/fusible/peers.h``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..extension import TYPE_CODES, address, compiled, device_refusal, stream
from ..problems.gemm import RowSlots
from .gemm import MAX_GROUPS

NAME = "fusible"
MAX_RANKS = 16
SIGNAL_BYTES = 128
STATE_BYTES = 32
STATE_OF_SIGNALS = 16  # bytes; behind them stands what statistics say


LATE, OTHER, OVERFLOW = 1, 2, 3  # failures


class LaneReport(NamedTuple):
    """The report of kernels to the host: the fields of ``LaneReport``, read from a tensor of integers.

    Attributes:
        failure: 0, or one of the constants above.
        peer: the rank that did not arrive, made another call, or would own too many rows.
        kind, exchange: the step that this rank waited for.
        seen: the last signal of the peer, or the rows that it would own.
        came: a bit for each rank that arrived.
        required, dropped: the most rows that a rank had to own, and how many were left out, so far.
    """

    failure: int
    peer: int
    kind: int
    exchange: int
    seen: int
    came: int
    required: int
    dropped: int

    @property
    def kind_seen(self) -> int:
        """The kind of the peer's signal."""
        return self.seen & 0xFFFF


class LaneLaunch(NamedTuple):
    """The common arguments of all launches of a lane.

    Attributes:
        rank: this rank.
        buffers: the addresses of the buffers of all ranks, as this one sees them.
        state: uint8 [STATE_BYTES] on the device.
        report: int64 [8], in memory of the host that the device may write.
    """

    device: int
    rank: int
    buffers: list[int]
    state: Tensor
    report: Tensor

    def arguments(self, exchange: int) -> dict[str, Any]:
        """The arguments of a launch of an exchange."""
        return {
            "device": self.device,
            "stream": stream(self.device),
            "rank": self.rank,
            "buffers": self.buffers,
            "state": self.state.data_ptr(),
            "report": self.report.data_ptr(),
            "exchange": exchange,
        }


class Slots(NamedTuple):
    """The rows of the slots of some tokens.

    Attributes:
        row_of_slot: int32 [T, k], among the rows of all ranks.
        firsts: int32 [R + 1]: the first row of each rank, and the end of the last.
        capacity: the most rows that a rank keeps.
    """

    row_of_slot: Tensor
    firsts: Tensor
    capacity: int

    def arguments(self) -> dict[str, int]:
        return {
            "row_of_slot": self.row_of_slot.data_ptr(),
            "firsts": self.firsts.data_ptr(),
            "capacity": self.capacity,
        }


class Published(NamedTuple):
    """Ids, and a number of 4 or 8 bytes for each, which are written to all ranks.

    Attributes:
        ids, numbers: [T, k], dense.
        most_slots: what there is room for, of each rank.
        experts: ids from there on are of none.
        ids_at, numbers_at: where in a buffer.
    """

    ids: Tensor
    numbers: Tensor
    most_slots: int
    experts: int
    ids_at: int
    numbers_at: int


class RowsArriving(NamedTuple):
    """The announcement of rows.

    Attributes:
        slot_of_row: int32 [S]: the slot of each row of all ranks.
        counters: see :func:`fusible.ops.kernels.hopper.arrivals.counters`.
        blocks: the number of blocks of threads that bring them, one per multiprocessor.
    """

    slot_of_row: Tensor
    counters: Tensor
    blocks: int


def refusal(device: int | None, num_experts: int, ranks: int, dtype: torch.dtype) -> str | None:
    """Why the kernels do not serve such a group; None: they do."""
    if device is None:
        return "needs CUDA devices"
    if (why := device_refusal(device)) is not None:
        return why
    if dtype not in TYPE_CODES:
        return f"needs rows of 16 or 32 bits, got {dtype}"
    if num_experts > MAX_GROUPS or ranks > MAX_RANKS:
        return f"takes at most {MAX_GROUPS} experts and {MAX_RANKS} ranks, got {num_experts} and {ranks}"
    return None


def publish(
    lane: LaneLaunch, exchange: int, kind: int, signals_at: int, timeout: float, published: Published | None = None
) -> None:
    """Signals to all ranks that earlier work on the stream is visible, and waits for their signals.

    Args:
        timeout: seconds; 0: forever.
    """
    everywhere: dict[str, Any] = {}
    if published is not None:
        everywhere = {
            "ids": published.ids.data_ptr() or lane.state.data_ptr(),  # of none; but an address says that there are ids
            "int64_ids": published.ids.dtype == torch.int64,
            "slots": published.ids.numel(),
            "most_slots": published.most_slots,
            "experts": published.experts,
            "ids_at": published.ids_at,
            "numbers": published.numbers.data_ptr(),
            "number_bytes": published.numbers.element_size(),
            "numbers_at": published.numbers_at,
        }
    compiled().publish(
        **lane.arguments(exchange),
        signals_at=signals_at,
        kind=kind,
        timeout=int(timeout * 1e9),
        **everywhere,
    )


def divide_rows(
    lane: LaneLaunch, exchange: int, tokens_per_expert: Tensor, capacity: int, fails: bool
) -> tuple[Tensor, Tensor]:
    """The first row of each rank, int32 [R + 1], and the split sizes of this one, int32 [E / R].

    Args:
        tokens_per_expert: int32 [E + 1].
        fails: whether the lane does if a rank would own more rows than ``capacity``.
    """
    ranks, experts = len(lane.buffers), tokens_per_expert.shape[0] - 1
    firsts, split_sizes = map(tokens_per_expert.new_empty, (ranks + 1, experts // ranks))
    compiled().divide_rows(
        **lane.arguments(exchange),
        tokens_per_expert=tokens_per_expert.data_ptr(),
        experts=experts,
        capacity=capacity,
        fails=fails,
        firsts=firsts.data_ptr(),
        split_sizes=split_sizes.data_ptr(),
    )
    return firsts, split_sizes


def stage_rows(lane: LaneLaunch, exchange: int, rows: Tensor, slots: Slots, at: int) -> None:
    """Copies the rows [Q, H] that this rank keeps to ``at`` in its buffer."""
    compiled().stage_rows(**_rows(lane, exchange, rows, slots, at), source=rows.data_ptr(), pitch=rows.stride(0))


def send_rows(rows: Tensor, slots: RowSlots) -> None:
    """Copies the rows [Q, H] that this rank keeps to the slots of their tokens."""
    device = rows.get_device()
    compiled().stage_rows(
        device=device,
        stream=stream(device),
        **slots.arguments(),
        report=0,
        exchange=0,
        type=TYPE_CODES[rows.dtype],
        tokens=0,
        columns=rows.shape[1],
        top_k=0,
        row_of_slot=0,
        capacity=rows.shape[0],
        out=0,
        source=rows.data_ptr(),
        pitch=rows.stride(0),
    )


def pull(lane: LaneLaunch, exchange: int, slots: Slots, at: int, out: Tensor, fill: bool) -> None:
    """Pulls the rows [Q, H] of this rank from the tokens [T, H] of all ranks, at ``at`` in the buffers.

    Args:
        slots: the slots of all ranks, [R * T, k].
        fill: whether the tail is zeroed; otherwise it is unchanged.
    """
    compiled().pull(**_rows(lane, exchange, out, slots, at, ranks=len(lane.buffers)), fill=fill)


def pull_blocks(
    lane: LaneLaunch, exchange: int, slots: Slots, at: int, out: Tensor, fill: bool, arrivals: RowsArriving
) -> None:
    """:func:`pull` by blocks of rows, in their order; the next kernel on the stream may begin meanwhile."""
    compiled().pull_blocks(
        **_rows(lane, exchange, out, slots, at, ranks=len(lane.buffers)),
        slot_of_row=arrivals.slot_of_row.data_ptr(),
        arrived=arrivals.counters.data_ptr(),
        blocks=arrivals.blocks,
        fill=fill,
    )


def pull_sum(
    lane: LaneLaunch, exchange: int, slots: Slots, at: int, out: Tensor, blocks: int = 0, at_slots: bool = False
) -> None:
    """Sums the rows of this rank's tokens, at ``at`` in the buffers, to [T, H].

    Args:
        blocks: the number of multiprocessors to use; 0: all.
        at_slots: the rows are those of this rank's slots, in its own buffer.
    """
    compiled().pull_sum(**_rows(lane, exchange, out, slots, at), blocks=blocks, at_slots=at_slots)


def push_sums(lane: LaneLaunch, exchange: int, rows: Tensor, slots: Slots, at: int, blocks: int = 0) -> None:
    """Sums the rows [Q, H] of this rank by token; stores the sums at ``at`` in the buffers of the tokens' ranks.

    A buffer has [T, R, H] there: the parts of a token, by the rank that sums them.

    Args:
        slots: of all ranks, [R * T, k].
        blocks: the number of multiprocessors to use; 0: all.
    """
    compiled().push_sums(
        **_rows(lane, exchange, rows, slots, at, ranks=len(lane.buffers)),
        source=rows.data_ptr(),
        pitch=rows.stride(0),
        blocks=blocks,
    )


def sum_parts(lane: LaneLaunch, exchange: int, slots: Slots, at: int, out: Tensor) -> None:
    """Sums what ranks pushed for this rank's tokens to ``at`` in its buffer, to [T, H]."""
    compiled().sum_parts(**_rows(lane, exchange, out, slots, at))


def numbers_to_rows(lane: LaneLaunch, exchange: int, slots: Slots, at: int, out: Tensor) -> None:
    """Moves numbers of slots, of all ranks, to the rows [Q] of this rank. The tail is zero."""
    compiled().numbers_to_rows(**_numbers(lane, exchange, slots, at, out))


def pull_numbers(lane: LaneLaunch, exchange: int, slots: Slots, at: int, out: Tensor) -> None:
    """Moves numbers of rows to the slots [T, k] of this rank; 0 for slots without a row."""
    compiled().pull_numbers(**_numbers(lane, exchange, slots, at, out))


def _rows(lane: LaneLaunch, exchange: int, out: Tensor, slots: Slots, at: int, ranks: int = 1) -> dict[str, Any]:
    tokens, top_k = slots.row_of_slot.shape
    return {
        **lane.arguments(exchange),
        "type": TYPE_CODES[out.dtype],
        "tokens": tokens // ranks,
        "columns": out.shape[1],
        "top_k": top_k,
        **slots.arguments(),
        "at": at,
        "out": address(out),
    }


def _numbers(lane: LaneLaunch, exchange: int, slots: Slots, at: int, out: Tensor) -> dict[str, Any]:
    return {
        **lane.arguments(exchange),
        "number_bytes": out.element_size(),
        "slots": slots.row_of_slot.numel(),
        **slots.arguments(),
        "at": at,
        "out": out.data_ptr(),
    }
