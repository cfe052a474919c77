"""Rows that arrive while a product runs: our kernels on the CPU, in two processes with common memory; see ``ep_world``.

The first rank brings rows, the second multiplies them. Each runs its kernel in its own process, at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from ep_cases import raises
from ep_shared_memory import allocate
from ep_world import World
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from fusible.ops.activation_spec import ActivationSpec
from fusible.ops.kernels.hopper import peers
from fusible.ops.kernels.hopper.epilogue import activation
from fusible.ops.kernels.hopper.extension import TYPE_CODES

CASES: list[Callable[[World], None]] = []
RANKS, TOKENS, TOP_K, EXPERTS, COLUMNS, HIDDEN, ROWS = 2, 75, 3, 6, 1032, 64, 64
"""More columns than a warp takes at once, and not a multiple of that."""
BF16 = torch.bfloat16
TOO_SOON = "rows were read before they were there"


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


class Exchange(NamedTuple):
    """Tokens of both ranks, of which the experts of the second one get rows."""

    x: Tensor
    ids: Tensor
    slots: peers.Slots
    slot_of_row: Tensor
    sizes: Tensor
    capacity: int

    @classmethod
    def random(cls, seed: int = 0, spare: int = 70) -> Exchange:
        """``spare`` rows are behind the last expert's; fewer than none: so many are left out."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(RANKS * TOKENS, COLUMNS, generator=draw).to(BF16)
        ids = torch.rand(RANKS * TOKENS, EXPERTS, generator=draw).topk(TOP_K).indices
        slot_of_row = ids.flatten().sort(stable=True).indices.int()
        row_of_slot = torch.empty_like(slot_of_row)
        row_of_slot[slot_of_row.long()] = torch.arange(ids.numel(), dtype=torch.int32)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).view(RANKS, -1)
        firsts = F.pad(counts.sum(1).cumsum(0), (1, 0)).int()
        capacity = int(counts[1].sum()) + spare
        ends = counts[1].cumsum(0).clamp(max=capacity)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).int()
        slots = peers.Slots(row_of_slot.view_as(ids), firsts, capacity)
        return cls(x, ids, slots, slot_of_row, sizes, capacity)

    def expected(self) -> Tensor:
        """The rows; the tail is zero."""
        first, kept = int(self.slots.firsts[1]), int(self.sizes.sum())
        rows = self.x[self.slot_of_row[first : first + kept].long() // TOP_K]
        return F.pad(rows, (0, 0, 0, self.capacity - kept))

    def lane(self) -> tuple[peers.LaneLaunch, list[Tensor]]:
        """Of the second rank, with buffers in which all ranks have their tokens."""
        buffers = [part.contiguous().view(torch.uint8) for part in self.x.split(TOKENS)]
        state, report = torch.zeros(peers.STATE_BYTES, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)
        return peers.LaneLaunch(0, 1, [b.data_ptr() for b in buffers], state, report), buffers

    def pull_blocks(self, out: Tensor, arrived: Tensor, blocks: int, fill: bool = True) -> None:
        lane, buffers = self.lane()
        peers.compiled().pull_blocks(
            **peers._rows(lane, 0, out, self.slots, 0, ranks=RANKS),
            slot_of_row=self.slot_of_row.data_ptr(),
            arrived=arrived.data_ptr(),
            blocks=blocks,
            fill=fill,
        )
        assert buffers

    def counters(self) -> Tensor:
        return torch.zeros(-(-self.capacity // ROWS), dtype=torch.int32)


def multiplied(problem: Exchange, rows: Tensor, arrived: Tensor | None, pieces: int = 0) -> Tensor:
    """The product of the rows and of weights, and its activation."""
    groups = problem.sizes.shape[0]
    weights = torch.randn(groups, 2 * HIDDEN, COLUMNS, generator=torch.Generator().manual_seed(1)).to(BF16)
    out = torch.full((rows.shape[0], HIDDEN), float("nan"), dtype=BF16)
    waits: dict[str, Any] = {} if arrived is None else {"arrived": arrived.data_ptr(), "pieces": pieces}
    peers.compiled().linear_activation(
        activation=activation(ActivationSpec("silu", gated=True), HIDDEN),
        layout=0,
        operand=TYPE_CODES[BF16],
        device=0,
        stream=0,
        groups=groups,
        tokens=rows.shape[0],
        n=2 * HIDDEN,
        k=COLUMNS,
        a=rows.data_ptr(),
        a_pitch=COLUMNS,
        b=weights.data_ptr(),
        b_pitch=COLUMNS,
        b_group=2 * HIDDEN * COLUMNS,
        b_addresses=[],
        sizes=problem.sizes.data_ptr(),
        int64_sizes=False,
        preact=0,
        postact=out.data_ptr(),
        **waits,
    )
    return out[: int(problem.sizes.sum())]


# ------------------------------------------------------------------------------------------------------ the rows alone


@case
def rows_come_block_by_block(world: World) -> None:
    """By any number of blocks of threads; a block that one waits for may be another's."""
    for seed, spare in ((0, 70), (1, 0), (2, -50)):
        problem = Exchange.random(seed, spare)
        for blocks in (1, 2, 3, 4):
            out = torch.full((problem.capacity, COLUMNS), float("nan"), dtype=BF16)
            arrived = problem.counters()
            problem.pull_blocks(out, arrived, blocks)
            assert torch.equal(out, problem.expected())
            assert arrived.unique().numel() == 1
            assert arrived[0] == 3  # pieces of 512 columns


@case
def rows_behind_the_last_are_not_touched(world: World) -> None:
    problem = Exchange.random(0, 200)
    out = torch.full((problem.capacity, COLUMNS), float("nan"), dtype=BF16)
    arrived, kept = problem.counters(), int(problem.sizes.sum())
    problem.pull_blocks(out, arrived, 3, fill=False)
    assert torch.equal(out[:kept], problem.expected()[:kept])
    assert out[kept:].isnan().all()
    assert arrived.nonzero().numel() == -(-kept // ROWS)


# --------------------------------------------------------------------------------------------------- beside a product


class Shared(NamedTuple):
    """What both processes see: rows that are NaN at first, and counters that are zero."""

    rows: Tensor
    arrived: Tensor
    mapping: Any

    @classmethod
    def of(cls, problem: Exchange) -> Shared:
        size, counters = problem.capacity * COLUMNS * 2, problem.counters()
        world = dist.group.WORLD
        assert world is not None
        memory = allocate(size + 4096 + counters.nbytes, torch.device("cpu"), world)
        first = memory.mapping[0]
        at = -(-size // 4096) * 4096
        arrived = first[at : at + counters.nbytes].view(torch.int32)
        if dist.get_rank() == 0:
            arrived.zero_()
        dist.barrier()
        return cls(first[:size].view(BF16).view(problem.capacity, COLUMNS), arrived, memory)


def beside(world: World, told_first: bool = False, waits: bool = True) -> None:
    """A product begins before any row is there; rows come later. It gives what it gives of rows that are there."""
    problem = Exchange.random()
    shared, late = Shared.of(problem), 1.0
    if world.rank == 0:
        if told_first:
            shared.arrived.fill_(3)
        time.sleep(late)
        problem.pull_blocks(shared.rows, shared.arrived, 3)
        dist.barrier()
        return
    began = time.monotonic()
    try:
        out = multiplied(problem, shared.rows, shared.arrived, 3 if waits else 0)
        seconds = time.monotonic() - began
    finally:
        dist.barrier()
    expected = multiplied(problem, problem.expected(), None)
    assert not expected.isnan().any()
    assert torch.equal(out, expected), TOO_SOON
    assert seconds > late


@case
def a_product_waits_for_its_rows(world: World) -> None:
    beside(world)


def a_fault_is_seen(world: World, **fault: bool) -> None:
    """By the rank that multiplies."""
    with raises(AssertionError, TOO_SOON) if world.rank == 1 else nullcontext():
        beside(world, **fault)


@case
def a_product_that_does_not_wait_is_seen(world: World) -> None:
    a_fault_is_seen(world, waits=False)


@case
def rows_that_are_told_of_too_soon_are_seen(world: World) -> None:
    a_fault_is_seen(world, told_first=True)
