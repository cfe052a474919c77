"""Rows that arrive while a product runs: our kernels on the CPU, in two processes with common memory; see ``ep_world``.

The first rank brings rows, the second multiplies them. Each runs its kernel in its own process, at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from emulation import harness
from ep_cases import batch_for, counts_of, raises
from ep_shared_memory import allocate
from ep_world import Results, World, part, same, trained
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from fusible.ops.ep import overlap
from fusible.ops.kernels.extension import TYPE_CODES
from fusible.ops.kernels.hopper import arrivals, gemm, peers
from fusible.ops.kernels.hopper.epilogue import activation
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout, RowSlots
from fusible.ops.values.activation_spec import ActivationSpec

CASES: list[Callable[[World], None]] = []
RANKS, TOP_K, ROWS = 2, 3, 64  # of a block
TOKENS, EXPERTS, COLUMNS, HIDDEN = 75, 6, 2056, 64
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
    def random(
        cls, seed: int = 0, spare: int = 70, tokens: int = TOKENS, experts: int = EXPERTS, columns: int = COLUMNS
    ) -> Exchange:
        """``spare`` rows are behind the last expert's; fewer than none: so many are left out."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(RANKS * tokens, columns, generator=draw).to(BF16)
        ids = torch.rand(RANKS * tokens, experts, generator=draw).topk(TOP_K).indices
        slot_of_row = ids.flatten().sort(stable=True).indices.int()
        row_of_slot = torch.empty_like(slot_of_row)
        row_of_slot[slot_of_row.long()] = torch.arange(ids.numel(), dtype=torch.int32)
        counts = torch.bincount(ids.flatten(), minlength=experts).view(RANKS, -1)
        firsts = F.pad(counts.sum(1).cumsum(0), (1, 0)).int()
        capacity = int(counts[1].sum()) + spare
        ends = counts[1].cumsum(0).clamp(max=capacity)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).int()
        slots = peers.Slots(row_of_slot.view_as(ids), firsts, capacity)
        return cls(x, ids, slots, slot_of_row, sizes, capacity)

    def to(self, device: str) -> Exchange:
        """The same, with its tensors on a device."""
        slots = self.slots._replace(row_of_slot=self.slots.row_of_slot.to(device), firsts=self.slots.firsts.to(device))
        moved = (self.x.to(device), self.ids.to(device), slots, self.slot_of_row.to(device), self.sizes.to(device))
        return Exchange(*moved, self.capacity)

    @property
    def pieces(self) -> int:
        """How often each block is told of."""
        return arrivals.pieces_of_block(self.x)

    def expected(self) -> Tensor:
        """The rows; the tail is zero."""
        first, kept = int(self.slots.firsts[1]), int(self.sizes.sum())
        rows = self.x[self.slot_of_row[first : first + kept].long() // TOP_K]
        return F.pad(rows, (0, 0, 0, self.capacity - kept))

    def lane(self) -> tuple[peers.LaneLaunch, list[Tensor]]:
        """The lane of the second rank, with buffers that hold the tokens of all ranks."""
        on = self.x.device
        buffers = [part.contiguous().view(torch.uint8) for part in self.x.chunk(RANKS)]
        state = torch.zeros(peers.STATE_BYTES, dtype=torch.uint8, device=on)
        report = torch.zeros(8, dtype=torch.int64, pin_memory=on.type == "cuda")
        return peers.LaneLaunch(0, 1, [b.data_ptr() for b in buffers], state, report), [*buffers, state, report]

    def pull_blocks(self, out: Tensor, arrived: Tensor, blocks: int, fill: bool = True) -> list[Tensor]:
        """Returns the memory that the kernel uses."""
        lane, kept = self.lane()
        peers.compiled().pull_blocks(
            **peers._rows(lane, 0, out, self.slots, 0, ranks=RANKS),
            slot_of_row=self.slot_of_row.data_ptr(),
            arrived=arrived.data_ptr(),
            blocks=blocks,
            fill=fill,
        )
        return kept

    def counters(self) -> Tensor:
        return torch.zeros(-(-self.capacity // ROWS), dtype=torch.int32, device=self.x.device)


def weights_of(problem: Exchange, hidden: int = HIDDEN) -> Tensor:
    """Weights of gate and up, [experts, 2 hidden, columns]."""
    shape = problem.sizes.shape[0], 2 * hidden, problem.x.shape[1]
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / shape[2] ** 0.5
    return weights.to(problem.x.device, BF16)


def output_of(problem: Exchange, weights: Tensor) -> Tensor:
    """For what the product gives, NaN."""
    return torch.full((problem.capacity, weights.shape[1] // 2), float("nan"), dtype=BF16, device=weights.device)


def check_slots(problem: Exchange, columns: int, bias: bool) -> None:
    """Rows of the product are at the slots of their tokens, in the buffers of the ranks; nothing else is written."""
    on, draw = problem.x.device, torch.Generator().manual_seed(5)
    experts, slots = problem.sizes.shape[0], problem.ids.numel() // RANKS
    weights = (torch.randn(experts, columns, problem.x.shape[1], generator=draw) / 8).to(on, BF16)
    biases = torch.randn(experts, columns, generator=draw).to(on, BF16) if bias else None
    rows, kept = problem.expected().to(on), int(problem.sizes.sum())
    plain = torch.full((problem.capacity, columns), torch.nan, dtype=BF16, device=on)
    buffers = [torch.full((slots, columns), -77.0, dtype=BF16, device=on) for _ in range(RANKS)]
    lane, used = problem.lane()
    addresses = [buffer.data_ptr() for buffer in buffers]
    row_slots = RowSlots(1, addresses, lane.state, problem.slot_of_row, problem.slots.firsts, slots, 0)
    for given in (None, row_slots):
        problem_of = GroupedGemm(Layout.NT, rows, weights, problem.sizes, plain, bias=biases, slots=given)
        gemm.run(problem_of)
    first = int(problem.slots.firsts[1])
    expected = torch.full((RANKS * slots, columns), -77.0, dtype=BF16, device=on)
    expected[problem.slot_of_row[first : first + kept].long()] = plain[:kept]
    assert not plain[:kept].isnan().any()
    assert torch.equal(torch.cat(buffers), expected)
    lane.state.view(torch.int32)[3] = 1  # it has failed: others may still read what stands there
    gemm.run(GroupedGemm(Layout.NT, rows * 2, weights, problem.sizes, plain, bias=biases, slots=row_slots))
    assert torch.equal(torch.cat(buffers), expected)
    groups = zip(rows[:kept].split(problem.sizes.tolist()), weights, strict=True)
    by_hand = torch.cat([of_group.double() @ weight.double().mT for of_group, weight in groups])
    if biases is not None:
        by_hand += biases.double().repeat_interleave(problem.sizes.long(), 0)
    torch.testing.assert_close(plain[:kept].double(), by_hand, rtol=1e-2, atol=2e-2)
    del used


def multiply(
    problem: Exchange, weights: Tensor, rows: Tensor, out: Tensor, arrived: Tensor | None, pieces: int = 0
) -> Tensor:
    """The product of the rows and of weights, and its activation, into ``out``. Launches one kernel."""
    groups, double, columns = weights.shape
    waits: dict[str, Any] = {} if arrived is None else {"arrived": arrived.data_ptr(), "pieces": pieces}
    peers.compiled().linear_activation(
        activation=activation(ActivationSpec("silu", gated=True), double // 2),
        layout=0,
        operand=TYPE_CODES[BF16],
        device=0,
        stream=0,
        groups=groups,
        tokens=rows.shape[0],
        n=double,
        k=columns,
        a=rows.data_ptr(),
        a_pitch=columns,
        b=weights.data_ptr(),
        b_pitch=columns,
        b_group=double * columns,
        b_addresses=[],
        sizes=problem.sizes.data_ptr(),
        int64_sizes=False,
        preact=0,
        postact=out.data_ptr(),
        **waits,
    )
    return out


# ------------------------------------------------------------------------------------------------------ the rows alone


@case
def rows_come_block_by_block(world: World) -> None:
    """By any number of blocks of threads; in vectors of 16 bytes, and in words of two."""
    for seed, (spare, columns, told) in enumerate(((70, COLUMNS, 32), (0, 2048, 16), (-50, 2047, 16), (9, 2049, 32))):
        problem = Exchange.random(seed, spare, columns=columns)
        for blocks in (1, 2, 4):
            out = torch.full((problem.capacity, columns), float("nan"), dtype=BF16)
            arrived = problem.counters()
            problem.pull_blocks(out, arrived, blocks)
            assert torch.equal(out, problem.expected())
            assert arrived.tolist() == [problem.pieces] * len(arrived)
            assert problem.pieces == told


@case
def a_lane_that_has_failed_brings_what_no_sum_hides(world: World) -> None:
    """NaN, and all rows are told of, so that a product that waits for them ends."""
    problem, (lane, used) = Exchange.random(), Exchange.random().lane()
    lane.state.view(torch.int32)[3] = 1
    out, arrived = torch.zeros(problem.capacity, COLUMNS, dtype=BF16), problem.counters()
    with patch.object(Exchange, "lane", lambda self: (lane, used)):
        problem.pull_blocks(out, arrived, 2)
    kept = int(problem.sizes.sum())
    assert out[:kept].isnan().all()
    assert not out[kept:].any()
    assert arrived.tolist() == [problem.pieces] * len(arrived)


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
    """Memory that both processes see: rows that are NaN at first, and counters that are zero."""

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
    shared, weights, late = Shared.of(problem), weights_of(problem), 1.0
    out = output_of(problem, weights)
    if world.rank == 0:
        if told_first:
            shared.arrived.fill_(problem.pieces)
        time.sleep(late)
        problem.pull_blocks(shared.rows, shared.arrived, 3)
        dist.barrier()
        return
    began = time.monotonic()
    try:
        out = multiply(problem, weights, shared.rows, out, shared.arrived, problem.pieces if waits else 0)
        seconds = time.monotonic() - began
    finally:
        dist.barrier()
    kept, expected = (
        int(problem.sizes.sum()),
        multiply(problem, weights, problem.expected(), output_of(problem, weights), None),
    )
    assert not expected[:kept].isnan().any()
    assert torch.equal(out[:kept], expected[:kept]), TOO_SOON
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


# ---------------------------------------------------------------------------------------------------- the whole layer


def products_of(world: World, **settings: Any) -> tuple[Results, list[dict[str, Any]]]:
    """A step of a layer whose experts run on our kernels too, and the launches of its first product."""
    library, launches = peers.compiled(), []

    def launch(**arguments: Any) -> None:
        launches.append(arguments)
        library._module.linear_activation(**arguments)

    noted = patch.object(library, "linear_activation", library._call(launch), create=True)
    with harness.installed(library), noted:
        group = world.group(dtype=BF16, capacity=2.0, **settings)
        batch = batch_for(group, counts_of(world))
        return trained(part(group), batch.of(world.rank)), launches


@case
def the_second_product_of_a_layer_sends_its_rows_to_slots(world: World) -> None:
    """With biases, of which there are some here, and without; of long groups, and of short ones."""
    expected, _ = products_of(world)
    library, launches = peers.compiled(), []

    def launch(**arguments: Any) -> None:
        launches.append(arguments)
        library._module.gemm_to_slots(**arguments)

    noted = patch.object(library, "gemm_to_slots", library._call(launch), create=True)
    with noted, patch.object(peers, "send_rows", side_effect=AssertionError("rows went there one by one")):
        came, _ = products_of(world, overlap_combine=True)
        same(came, expected)
        both, _ = products_of(world, overlap_combine=True, overlap_dispatch=2)
        same(both, expected)
    assert len(launches) == 2


@case
def chosen_overlaps_give_the_bits_of_none(world: World) -> None:
    """Rows of this size are too few by default."""
    expected, off = products_of(world, overlap_dispatch=0, overlap_combine=False)
    unless_told, _ = products_of(world)
    same(unless_told, expected)
    library, sent = peers.compiled(), []

    def send(**arguments: Any) -> None:
        sent.append(arguments)
        library._module.gemm_to_slots(**arguments)

    noted = patch.object(library, "gemm_to_slots", library._call(send), create=True)
    with noted, patch.object(overlap, "_LEAST_BYTES", 0), patch.object(overlap, "_BRINGING", 2):
        came, launches = products_of(world)
    same(came, expected)
    assert [("arrived" in launch) for launch in (*off, *launches)] == [False, True]
    assert len(sent) == 1


SLOTS = ((75, 6, 136, False, 70), (300, 4, 264, True, 0), (700, 4, 320, False, -50), (700, 4, 64, True, 9))
"""Tokens, experts, columns, whether there is a bias, and rows that are spare: of short groups and of long ones."""


@case
def products_send_rows_of_any_group_to_their_slots(world: World) -> None:
    """The buffers of both ranks are in the memory of this process."""
    with harness.installed(peers.compiled()):
        for seed, (tokens, experts, columns, bias, spare) in enumerate(SLOTS):
            check_slots(Exchange.random(seed, spare, tokens, experts, HIDDEN), columns, bias)


@case
def the_first_product_of_a_layer_waits(world: World) -> None:
    expected, plain = products_of(world)
    came, launches = products_of(world, overlap_dispatch=2)
    same(came, expected)
    assert [("arrived" in launch) for launch in (*plain, *launches)] == [False, True]
    assert launches[0]["pieces"] == 16
