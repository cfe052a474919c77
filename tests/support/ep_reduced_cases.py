"""``combine="reduced"`` of the transport ``symmetric``; see ``ep_symmetric_cases``.

The transport ``collective`` tells what its bits must be. Memory for parts of sums holds NaN before each exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from ep_carried import Carried, drawn_ids, sources_of
from ep_cases import (
    a_checkpoint_gives_gradients_of_the_routing_that_it_computes_again,
    batch_for,
    counts_of,
    largest,
    of_one_owner,
    raises,
    reduced,
    sums_by_rank_are_those_that_reduced_promises,
)
from ep_symmetric_cases import caught, forward, kinds_met, lane_of
from ep_world import Batch, Results, World, check_step, part, same, trained, unchecked
from torch import Tensor
from torch import distributed as dist

from fusible import Float8Block, config, ep
from fusible.ops.ep.symmetric import SymmetricLane, SymmetricTransport
from fusible.ops.kernels.hopper import peers

CASES: list[Callable[[World], None]] = [
    sums_by_rank_are_those_that_reduced_promises,
    a_checkpoint_gives_gradients_of_the_routing_that_it_computes_again,
]
STEP = [0, 1, 2, 3, 4]  # the kinds of the meetings of a step


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


def group_of(world: World, **settings: Any) -> ep.Group:
    return world.group(**{"combine": "reduced", **settings})


def poison(group: ep.Group) -> None:
    """No rank is in an exchange."""
    s = group.settings
    dist.barrier()
    lane_of(group).view("parts", s.dtype, s.max_tokens * group.size * s.hidden).fill_(torch.nan)
    dist.barrier()


def by_collectives(world: World, batch: Batch, lane: int = 0, **settings: Any) -> Results:
    group = group_of(world, **settings, transport="collective")
    return trained(part(group, lane), batch.of(world.rank))


def check_as_collective(world: World, batches: Sequence[Batch], **settings: Any) -> ep.Group:
    """Steps have the bits of the transport ``collective``."""
    group = group_of(world, **settings)
    for batch in batches:
        expected = by_collectives(world, batch, **settings)
        poison(group)
        same(trained(part(group), batch.of(world.rank)), expected)
    group.check()
    return group


# ------------------------------------------------------------------------------------------------- what it promises


@case
def any_tokens_have_the_bits_of_the_collective(world: World) -> None:
    for settings in (
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "top_k": 8, "capacity": 2.0},
        {"num_experts": world.size, "top_k": 1},
        {"num_experts": 48 * world.size, "top_k": 40},  # more than lanes
    ):
        group = group_of(world, **settings)
        last = group.settings.num_experts - 1
        batches = [batch_for(group, counts, 3) for counts in (counts_of(world), (0,) * world.size, (13,) * world.size)]
        if settings.get("capacity") is None:
            skewed = batches[2].ids.where(batches[2].ids % 3 > 0, last)
            none = torch.full_like(skewed, -1)
            batches += [batches[2]._replace(ids=ids) for ids in (skewed, none, none + last + 1)]
        group = check_as_collective(world, batches, **settings)
        assert group.statistics().exchanges == len(batches)


@case
def tokens_whose_experts_are_on_one_rank_have_the_bits_of_one_process(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        group = group_of(world, dtype=dtype)
        for seed, counts in enumerate((counts_of(world), (13,) * world.size)):
            poison(group)
            check_step(group, of_one_owner(group, counts, seed))


@case
def rows_too_many_are_in_no_sum(world: World) -> None:
    required = largest(world)
    for capacity in (required, required - 1, 3):
        settings = {"capacity": capacity, "overflow": "drop"}
        group = group_of(world)
        check_as_collective(world, [batch_for(group, counts_of(world), seed) for seed in (0, 1)], **settings)


@case
def sums_are_near_those_in_float64(world: World) -> None:
    """Two roundings, in both directions; columns that are no vectors, and rows with a pitch."""
    for dtype, hidden, pitch in ((torch.float32, 8, 8), (torch.bfloat16, 16, 24), (torch.bfloat16, 5, 7)):
        group = group_of(world, dtype=dtype, hidden=hidden, top_k=8, num_experts=8 * world.size)
        s = group.settings
        ids = drawn_ids(group, 1, s.max_tokens)
        ids[0, 0] = s.num_experts  # no expert
        values = torch.randn(*ids.shape, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
        mine, ends = values[world.rank], torch.tensor([group.local_experts.start, group.local_experts.stop])
        owners = (ids[world.rank] // group.num_local_experts).unsqueeze(2)
        parts = [sum_in_order(mine.where(owners == rank, 0)) for rank in range(world.size)]
        expected = sum_in_order(torch.stack(parts, 1))
        x = torch.zeros(s.max_tokens, hidden, dtype=dtype).requires_grad_()
        poison(group)
        dispatched = ep.EPDispatch(group)(x, top_k_index=ids[world.rank], top_k_weights=torch.ones(s.max_tokens, 8))
        rows, slots = dispatched[0], dispatched[3]
        of = sources_of(ids, ends, len(rows))
        tail = values[of.rank, of.token, of.slot].where(of.there.unsqueeze(1), torch.nan)
        wide = torch.nn.functional.pad(tail, (0, pitch - hidden), value=torch.nan)[:, :hidden]
        y = ep.EPCombine(group)(wide, row_of_slot=slots)
        poison(group)
        rows.backward(wide)
        assert torch.equal(y, expected)
        assert torch.equal(x.grad, expected)
        exact = mine.double().where(owners < world.size, 0).sum(1)
        rounding = torch.finfo(dtype).eps / 2 * (sum(each.double().abs() for each in parts) + y.double().abs())
        adding = 8 * torch.finfo(torch.float32).eps * mine.double().abs().sum(1)
        assert ((y.double() - exact).abs() <= rounding + adding).all()


def sum_in_order(rows: Tensor) -> Tensor:
    """[T, H]: of [T, n, H], in float32, rounded once."""
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32)
    for each in rows.unbind(1):
        total = total + each.float()
    return total.to(rows.dtype)


@case
def tokens_say_where_they_come_from_in_sums_by_rank(world: World) -> None:
    group = group_of(world, dtype=torch.bfloat16, num_experts=4 * world.size, hidden=16)
    lane, s = lane_of(group), group.settings

    def before(move: str, number: int) -> None:
        if move == "dispatch":  # others write parts after the ranks have met in it
            lane.view("parts", s.dtype, s.max_tokens * group.size * s.hidden).fill_(torch.nan)
        time.sleep(0.005 * (number % 3 == world.rank))

    assert Carried(world, group, s.max_tokens, before).mismatches(12).tolist() == [0, 0]


@case
def ranks_may_fuse_different_ops_and_bring_rows_beside_products(world: World) -> None:
    settings = {"dtype": torch.bfloat16, "overlap_dispatch": 1, "lanes": 2}
    group = group_of(world, **settings)
    batch = batch_for(group, counts_of(world))
    expected = by_collectives(world, batch, lane=1, **settings)
    for fusions in ((), ("EPGroupedMLP",), ("EPGroupedMLP", "GroupedMLP")):
        poison(group)
        with kinds_met() as kinds, config(disable_fusions=frozenset(fusions if world.rank == 0 else ())):
            same(trained(part(group, 1), batch.of(world.rank)), expected)
        assert [kind & 0xFF for kind in kinds] == STEP
    with config(recipe=Float8Block()):
        expected = by_collectives(world, batch, **settings)
        same(trained(part(group), batch.of(world.rank)), expected)


@case
def sums_are_sent_beside_products(world: World) -> None:
    """They may arrive as late as when the products have ended: here, they do."""
    sent: list[int] = []
    push = peers.push_sums

    def noted(*arguments: Any) -> None:
        sent.append(arguments[5])
        push(*arguments)

    with (
        patch.object(SymmetricTransport, "_run_beside", lambda mover, launch: launch),
        patch.object(peers, "push_sums", noted),
    ):
        for overlap in (7, 0, None):
            group = group_of(world, dtype=torch.bfloat16, overlap=overlap)
            assert isinstance(group.mover, SymmetricTransport)
            group.mover._multiprocessors = 132
            batch = batch_for(group, counts_of(world))
            expected = by_collectives(world, batch, dtype=torch.bfloat16)
            poison(group)
            same(trained(part(group), batch.of(world.rank)), expected)
    assert sent == [0, 7, 0, 0, 0, 0]


@case
def sums_by_few_multiprocessors_are_the_same(world: World) -> None:
    group = group_of(world)
    lane, s = lane_of(group), group.settings
    mine = batch_for(group, counts_of(world)).of(world.rank)
    rows, _, _, slots = ep.EPDispatch(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    table: Any = group.lanes[0]._open
    y = ep.EPCombine(group)(rows, row_of_slot=slots)
    for blocks in (1, 3):
        poison(group)
        peers.push_sums(lane.launch, 0, rows, table.slots, lane.regions.parts, blocks)
        dist.barrier()
        again = torch.full_like(y, torch.nan)
        peers.sum_parts(lane.launch, 0, table.mine, lane.regions.parts, again)
        assert torch.equal(again, y)
    assert lane.regions.parts == lane.regions.rows, "no memory for rows of all"
    assert lane.regions.end - lane.regions.parts >= s.max_tokens * group.size * s.hidden * s.dtype.itemsize


@case
def explain_says_that_sums_are_rounded_twice(world: World) -> None:
    group = group_of(world, dtype=torch.bfloat16, top_k=8)
    mine = batch_for(group, counts_of(world)).of(world.rank)
    said = str(part(group).explain(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights))
    assert "combine 'reduced': each rank rounds its sum of a token's rows, so bits depend on the ranks" in said
    assert {2: "1.0 rows per token travel back, 4.0 with", 4: "2.7 rows per token travel back, 6.0 with"}[
        world.size
    ] in said
    assert "overlap_combine=False" in said
    assert "no product sends rows that are summed first" in said
    with raises(ValueError, "overlap_combine=True needs combine='exact'"):
        group_of(world, overlap_combine=True)


# ------------------------------------------------------------------------------------------- failures, planted faults


def check_reduced(group: ep.Group, batch: Batch) -> None:
    """Checks the sums of a forward."""
    expected = reduced(group, batch).y
    poison(group)
    y = forward(group, batch.of(group.rank))
    group.check()
    assert torch.equal(y, expected)


def full_batch(group: ep.Group) -> Batch:
    """Rows of each rank are on all ranks."""
    batch = batch_for(group, (13,) * group.size)
    owned = group.num_local_experts
    return batch._replace(ids=torch.arange(batch.ids.numel()).view_as(batch.ids) % group.size * owned)


@case
def no_fault_no_wrong_sum(world: World) -> None:
    """The check that detects planted faults passes without one."""
    group = group_of(world)
    check_reduced(group, full_batch(group))


@case
def a_signal_before_the_sums_are_sent_is_seen(world: World) -> None:
    group = group_of(world)
    meet, push, add = SymmetricLane.meet, peers.push_sums, peers.sum_parts
    late: list[tuple[Any, ...]] = []

    def meets(self: SymmetricLane, exchange: Any, kind: str, *rest: Any) -> None:
        meet(self, exchange, kind, *rest)
        if kind == "combine" and world.rank == 0:
            dist.barrier()  # the others have summed
            push(*late.pop())

    def adds(*arguments: Any) -> None:
        add(*arguments)
        if world.rank:
            dist.barrier()

    pushes = (lambda *arguments: late.append(arguments)) if world.rank == 0 else push
    with (
        caught(world),
        patch.object(SymmetricLane, "meet", meets),
        patch.multiple(peers, push_sums=pushes, sum_parts=adds),
    ):
        check_reduced(group, full_batch(group))


@case
def a_rank_that_sums_before_it_has_met_is_seen(world: World) -> None:
    group = group_of(world, timeout=1)
    meet, push = SymmetricLane.meet, peers.push_sums

    def skips(self: SymmetricLane, exchange: Any, kind: str, *rest: Any) -> None:
        if kind != "combine" or world.rank != 0:
            meet(self, exchange, kind, *rest)

    def late(*arguments: Any) -> None:
        if world.rank != 0:
            time.sleep(0.5)
        push(*arguments)

    with caught(world), patch.object(SymmetricLane, "meet", skips), patch.object(peers, "push_sums", late):
        check_reduced(group, full_batch(group))


def faulty(world: World, fault: Callable[..., tuple[Any, ...]]) -> Any:
    """Rank 0 sends its sums with other arguments."""
    push = peers.push_sums
    return patch.object(peers, "push_sums", lambda *a: push(*(fault(*a) if world.rank == 0 else a)))


@case
def a_sum_that_is_not_sent_is_seen(world: World) -> None:
    def without_a_token(lane: Any, exchange: int, rows: Tensor, slots: peers.Slots, *rest: Any) -> Any:
        row_of_slot = slots.row_of_slot.clone()
        row_of_slot[-12] = slots.firsts[-1]  # of the last rank, and with a row here
        return lane, exchange, rows, slots._replace(row_of_slot=row_of_slot), *rest

    group = group_of(world)
    with caught(world), faulty(world, without_a_token):
        check_reduced(group, full_batch(group))


@case
def a_sum_in_the_place_of_another_rank_is_seen(world: World) -> None:
    group = group_of(world)
    row = group.settings.hidden * group.settings.dtype.itemsize

    def beside(lane: Any, exchange: int, rows: Tensor, slots: peers.Slots, at: int, *rest: Any) -> Any:
        return lane, exchange, rows, slots, at + row, *rest

    with caught(world), faulty(world, beside):
        check_reduced(group, full_batch(group))


@case
def a_row_too_few_in_a_sum_is_seen(world: World) -> None:
    group = group_of(world, capacity=13 * 3 * world.size)
    batch = full_batch(group)
    batch = batch._replace(ids=torch.zeros_like(batch.ids))  # rank 0 owns all, and has room for just them

    def keeps_fewer(lane: Any, exchange: int, rows: Tensor, slots: peers.Slots, *rest: Any) -> Any:
        return lane, exchange, rows, slots._replace(capacity=slots.capacity - 1), *rest

    check_reduced(group, batch)
    with caught(world), faulty(world, keeps_fewer):
        check_reduced(group, batch)


@case
def sums_that_are_still_on_their_way_are_seen(world: World) -> None:
    """Rank 0 does not wait for its own stream before it signals."""
    group = group_of(world, dtype=torch.bfloat16, overlap=7)
    batch = full_batch(group)
    expected = reduced(group, batch)
    poison(group)
    never = (lambda mover, launch: lambda: None) if world.rank == 0 else (lambda mover, launch: launch)
    with (
        caught(world),
        patch.object(SymmetricTransport, "_run_beside", never),
        patch.object(SymmetricTransport, "_blocks_beside", lambda mover, table: 7),
    ):
        assert torch.equal(trained_with_poison(world, group, batch).dx, expected.dx)


def trained_with_poison(world: World, group: ep.Group, batch: Batch) -> Results:
    """A step; parts hold NaN again before its backward."""
    mine, layer = batch.of(world.rank), part(group)
    x, weights = mine.x.clone().requires_grad_(), mine.weights.clone().requires_grad_()
    y = layer(x, top_k_index=mine.ids, top_k_weights=weights)
    poison(group)
    y.backward(mine.dy)
    return Results(y.detach(), x.grad, weights.grad, ())


def two_sums_in_turn(world: World, group: ep.Group) -> list[int]:
    """A backward of the dispatch without one of the combine; the last rank is slow to read. Returns kinds of meetings.

    No other meeting stands between the two uses of the parts.
    """
    mine = full_batch(group).of(world.rank)
    x, add = mine.x.clone().requires_grad_(), peers.sum_parts
    rows, _, _, slots = ep.EPDispatch(group)(x, top_k_index=mine.ids, top_k_weights=mine.weights)

    def slow(*arguments: Any) -> None:
        if world.rank == world.size - 1:
            time.sleep(0.5)
        add(*arguments)

    with kinds_met() as kinds, patch.object(peers, "sum_parts", slow):
        y = ep.EPCombine(group)(rows.detach(), row_of_slot=slots)
        rows.backward(torch.ones_like(rows))
    torch.testing.assert_close(y, 3 * mine.x)
    assert torch.equal(x.grad, 3 * torch.ones_like(mine.x))
    return [kind & 0xFF for kind in kinds]


@case
def parts_are_written_again_only_when_all_have_read_them(world: World) -> None:
    assert two_sums_in_turn(world, group_of(world)) == [1, 5, 3]  # combine, another use, dispatch backward


@case
def parts_that_are_written_too_early_are_seen(world: World) -> None:
    with caught(world), patch.object(SymmetricLane, "will_write", lambda *_: None):
        two_sums_in_turn(world, group_of(world))


@case
def a_row_too_many_is_an_error_and_the_lane_goes_on_after_a_reset(world: World) -> None:
    group = group_of(world, capacity=largest(world) - 1)
    batch = batch_for(group, counts_of(world))
    with unchecked(group):
        assert forward(group, batch.of(world.rank)).isnan().all()
    with raises(ep.CapacityError, r"dispatch of exchange 0 on lane 0: rank \d had to own"):
        forward(group, batch.of(world.rank))
    group.reset()
    few = batch._replace(ids=torch.where(torch.arange(3) > 0, -1, batch.ids))
    check_reduced(group, few)


@case
def a_lane_that_has_failed_sends_no_sums(world: World) -> None:
    group = group_of(world)
    lane, s = lane_of(group), group.settings
    mine = batch_for(group, counts_of(world)).of(world.rank)
    rows, _, _, slots = ep.EPDispatch(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    parts = lane.view("parts", s.dtype, s.max_tokens * group.size * s.hidden)
    dist.barrier()
    parts.fill_(7)
    dist.barrier()
    failed = lane.launch.state.view(torch.int32)[3:4].fill_(1)
    y = ep.EPCombine(group)(rows, row_of_slot=slots)
    dist.barrier()
    assert parts.eq(7).all()
    assert y.isnan().all()
    failed.zero_()
