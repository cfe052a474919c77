"""The transport ``symmetric`` on processes that share memory; see ``ep_world`` and ``ep_shared_memory``.

Faults are planted in one rank. Ranks meet at barriers of the process group where the order of their steps matters, so
that each fault shows every time, however busy the machine is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import ep_cases
import torch
from ep_carried import Carried
from ep_cases import batch_for, counts_of, largest, raises
from ep_world import Batch, H, Results, World, check_step, part, same, trained, unchecked, whole
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from fusible import ArgumentError, Float8Block, config, ep
from fusible.ops import kernels
from fusible.ops.ep import float8_rows, overlap
from fusible.ops.ep.symmetric import SymmetricLane, SymmetricTransport
from fusible.ops.kernels import products
from fusible.ops.kernels.hopper import peers

SHARED = (
    ep_cases.a_step_gives_the_bits_of_one_process,
    ep_cases.no_rank_has_tokens,
    ep_cases.one_expert_takes_all,
    ep_cases.all_ids_are_of_no_expert,
    ep_cases.an_expert_a_rank_and_one_slot_a_token,
    ep_cases.experts_of_all_ranks_are_hundreds,
    ep_cases.ids_of_32_bits_and_weights_of_other_dtypes,
    ep_cases.unfused_ops_give_the_same,
    ep_cases.ranks_may_differ_in_what_they_fuse,
    ep_cases.strided_tokens_and_gradients,
    ep_cases.any_problem_gives_the_bits_of_one_process,
    ep_cases.any_sequence_of_calls_gives_the_bits_of_one_process,
    ep_cases.capacity_that_is_hit_exactly_is_enough,
    ep_cases.rows_too_many_are_dropped_alike_and_counted,
    ep_cases.two_groups_and_layers_one_after_the_other,
    ep_cases.two_lanes_interleave,
    ep_cases.nothing_is_kept_without_gradients,
    ep_cases.checkpointing_runs_exchanges_again,
    ep_cases.a_checkpoint_gives_gradients_of_the_routing_that_it_computes_again,
    ep_cases.a_retained_graph_runs_backward_twice,
    ep_cases.frozen_parts_get_no_gradients_and_the_rest_keeps_its_bits,
    ep_cases.tokens_of_8_bits_are_the_rows_of_their_recipe,
    ep_cases.tokens_of_8_bits_are_within_half_a_step,
    ep_cases.gradients_of_8_bits_are_rounded_before_they_are_sent,
    ep_cases.rows_of_8_bits_are_not_quantised_again,
    ep_cases.ranks_that_send_tokens_of_other_bits,
    ep_cases.ranks_that_use_different_groups,
    ep_cases.ranks_whose_weights_are_of_other_bits,
    ep_cases.a_group_is_freed_with_its_last_reference,
    ep_cases.exchanges_that_are_not_paired,
    ep_cases.a_closed_group_says_so,
)
CASES: list[Callable[[World], None]] = list(SHARED)


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


@case
def rows_that_come_block_by_block_give_the_same(world: World) -> None:
    brought = []
    with patch.object(peers, "pull_blocks", side_effect=peers.pull_blocks) as by_blocks:
        for dtype, blocks, capacity in ((torch.bfloat16, 1, 2.0), (torch.float32, 3, "worst")):
            group = world.group(dtype=dtype, overlap_dispatch=blocks, capacity=capacity)
            for seed, counts in enumerate((counts_of(world), (0,) * world.size, (13,) * world.size)):
                check_step(group, batch_for(group, counts, seed))
            brought.append(by_blocks.call_count)
    assert brought == [3, 6]


@case
def gradients_of_tokens_are_summed_beside_those_of_weights(world: World) -> None:
    """On a part of the multiprocessors, of which a CPU has none: here the sum goes first."""
    blocks: list[int] = []

    def beside(mover: SymmetricTransport, lane: SymmetricLane, table: Any, taken: int) -> Callable[[], Tensor]:
        blocks.append(taken)
        sums = mover._sum(lane, table, mover._new_sums(table))
        return lambda: sums

    with patch.object(SymmetricTransport, "_sum_beside", beside):
        for overlap in (7, 0, None):
            group = world.group(dtype=torch.bfloat16, overlap=overlap)
            assert isinstance(group.mover, SymmetricTransport)
            for multiprocessors in (0, 132):
                group.mover._multiprocessors = multiprocessors
                check_step(group, batch_for(group, counts_of(world)))
    assert blocks == [7]


@case
def rows_that_are_sent_to_slots_give_the_same(world: World) -> None:
    """Whatever computes them: on this machine no product sends its rows by itself."""
    with kinds_met() as kinds, patch.object(products, "send_rows", side_effect=peers.send_rows) as sent:
        for dtype, capacity in ((torch.bfloat16, 2.0), (torch.float32, "worst")):
            group = world.group(dtype=dtype, overlap_combine=True, capacity=capacity, lanes=2)
            for seed, counts in enumerate((counts_of(world), (0,) * world.size, (13,) * world.size)):
                check_step(group, batch_for(group, counts, seed), part(group, seed % 2))
            with config(disable_fusions=frozenset({"EPGroupedMLP"} if world.rank == 0 else ())):
                check_step(group, batch_for(group, counts_of(world), 3))
        assert sent.call_count == (6 if world.rank == 0 else 8)
    assert [kind & 0xFF for kind in kinds] == [0, 1, 2, 3, 4] * 8


@case
def rows_too_many_are_not_sent_to_slots(world: World) -> None:
    required = largest(world)
    for capacity in (required, required - 1, 1):
        group = world.group(capacity=capacity, overflow="drop", overlap_combine=True)
        batch = batch_for(group, counts_of(world))
        expected = trained(whole(group), ep_cases.without_overflow(group, batch)).of(batch.counts, group)
        lane = lane_of(group)
        lane.view("slots", torch.float32, group.settings.slots, H).fill_(torch.nan)
        dist.barrier()
        same(trained(part(group), batch.of(world.rank)), expected)


@case
def a_rank_that_sums_before_rows_are_sent_is_seen(world: World) -> None:
    group = world.group(timeout=1, overlap_combine=True)
    lane_of(group).view("slots", torch.float32, group.settings.slots, H).fill_(torch.nan)
    meet, send = SymmetricLane.meet, peers.send_rows
    dist.barrier()

    def skips(self: SymmetricLane, exchange: Any, kind: str, *rest: Any) -> None:
        if kind != "combine" or world.rank != 0:
            meet(self, exchange, kind, *rest)

    def late(*arguments: Any) -> None:
        if world.rank != 0:
            time.sleep(0.5)
        send(*arguments)

    with caught(world), patch.object(SymmetricLane, "meet", skips), patch.object(kernels, "send_rows", late):
        check_sums(group, batch_for(group, counts_of(world)))


@case
def a_lane_that_has_failed_sends_nothing(world: World) -> None:
    group = world.group(overlap_combine=True)
    lane, mine = lane_of(group), batch_for(group, counts_of(world)).of(world.rank)
    slots = lane.view("slots", torch.float32, group.settings.slots, H)
    dispatch, combine = ep.EPDispatch(group), ep.EPCombine(group)
    rows, _, _, row_of_slot = dispatch(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    combine(rows, row_of_slot=row_of_slot)
    rows, _, _, row_of_slot = dispatch(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    dist.barrier()
    slots.fill_(7)
    dist.barrier()
    failed = lane.launch.state.view(torch.int32)[3:4].fill_(1)
    y = combine(rows, row_of_slot=row_of_slot)
    dist.barrier()
    assert slots.eq(7).all()
    assert y.isnan().all()
    failed.zero_()


def lane_of(group: ep.Group) -> SymmetricLane:
    assert isinstance(group.mover, SymmetricTransport)
    return group.mover._lanes[0]


def forward(group: ep.Group, mine: Batch, layer: Any = None) -> Tensor:
    with torch.no_grad():
        y: Tensor = (layer or part(group))(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    return y


# ------------------------------------------------------------------------------------------------ tokens of 8 bits


def by_collectives(world: World, batch: Batch, **settings: Any) -> Results:
    group = world.group(**settings, transport="collective")
    return trained(ep_cases.part_of_8_bits(group), batch.of(world.rank))


def poison_tokens(group: ep.Group) -> None:
    """Bytes and scales of tokens are NaN, and no rank is in an exchange."""
    regions = lane_of(group).regions
    dist.barrier()
    lane_of(group).view("tokens", torch.uint8, regions.row_numbers - regions.tokens).fill_(0xFF)
    dist.barrier()


@case
def tokens_of_8_bits_have_the_bits_of_collectives(world: World) -> None:
    """Even, skewed, empty, and without room for all rows; on both lanes; with sums of either kind."""
    none = (0,) * world.size
    for combine, capacity in itertools.product(("exact", "reduced"), ("worst", 3)):
        settings = {"dtype": torch.bfloat16, "hidden": 272, "lanes": 2, "combine": combine, "capacity": capacity}
        group = world.group(**settings, overflow="drop")
        for seed, counts in enumerate((counts_of(world), none, (13,) * world.size)):
            batch = ep_cases.wide_batch(group, counts, seed)
            for each in (batch, batch._replace(ids=torch.full_like(batch.ids, group.settings.num_experts - 1))):
                poison_tokens(group)
                with config(recipe=Float8Block()):
                    came = trained(ep_cases.part_of_8_bits(group, seed % 2), each.of(world.rank))
                    same(came, by_collectives(world, each, **settings, overflow="drop"))
        assert (group.statistics().dropped > 0) == (capacity == 3)


@case
def tokens_of_8_bits_travel_as_bytes(world: World) -> None:
    """272 bytes and 3 exponents, padded; few columns need more room in 8 bits than in 16."""
    pulled, pull = [], peers.pull

    def noted(lane: Any, exchange: int, slots: Any, at: int, out: Tensor, fill: bool) -> None:
        pulled.append(out.shape[1] * out.element_size())
        pull(lane, exchange, slots, at, out, fill)

    for hidden, sent in ((272, 288), (1, 16)):
        group = world.group(dtype=torch.bfloat16, hidden=hidden, max_tokens=130)
        mine = ep_cases.wide_batch(group, (130,) * world.size).of(world.rank)
        regions = lane_of(group).regions
        assert regions.row_numbers - regions.tokens >= 130 * max(sent, 2 * hidden)
        dispatch = ep.EPDispatch(group, recipe=Float8Block())
        with patch.object(peers, "pull", noted):
            rows, _, _, row_of_slot = dispatch(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        assert pulled.pop() == sent
        counted = (mine.ids < group.settings.num_experts).sum(1, keepdim=True)
        y = ep.EPCombine(group)(rows.div(2), row_of_slot=row_of_slot)
        want = ep_cases.rounded(mine).x.double() * counted / 2
        torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=0)


@case
def tokens_of_8_bits_come_before_the_first_product(world: World) -> None:
    """Whether the group has chosen to bring rows beside it, or was asked to. Its rows still go to slots."""
    for asked in ({}, {"overlap_dispatch": 1, "overlap_combine": True}):
        with patch.object(overlap, "_LEAST_BYTES", 0), patch.object(overlap, "_BRINGING", 1):
            group = world.group(dtype=torch.bfloat16, hidden=272, **asked)
        assert group.mover.overlaps[:2] == (1, True)
        batch = ep_cases.wide_batch(group, counts_of(world))
        expected = trained(whole(group), ep_cases.rounded(batch)).of(batch.counts, group)
        layer, mine = ep_cases.part_of_8_bits(group), batch.of(world.rank)
        with patch.object(peers, "pull_blocks", side_effect=peers.pull_blocks) as by_blocks:
            same(trained(layer, mine), expected)
        assert not by_blocks.call_count
        said = str(layer.explain(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights))
        assert "rows come before the first product: the scales of their bytes are put in order for it" in said


@case
def rows_too_many_of_8_bits_are_nan_and_an_error(world: World) -> None:
    group = world.group(dtype=torch.bfloat16, hidden=272, capacity=largest(world) - 1)
    mine = ep_cases.wide_batch(group, counts_of(world)).of(world.rank)
    with unchecked(group), config(recipe=Float8Block()):
        assert forward(group, mine, ep_cases.part_of_8_bits(group)).isnan().all()
    with raises(ep.CapacityError, "dispatch of exchange 0 on lane 0: rank"):
        group.check()


@case
def checkpoints_send_tokens_of_8_bits_again(world: World) -> None:
    group = world.group(dtype=torch.bfloat16, hidden=272)
    batch = ep_cases.wide_batch(group, counts_of(world))
    expected = trained(whole(group), ep_cases.rounded(batch)).of(batch.counts, group)
    layer, mine = ep_cases.part_of_8_bits(group), batch.of(world.rank)

    def poisoned(x: Tensor, **call: Tensor) -> Tensor:
        y: Tensor = checkpoint(layer, x, use_reentrant=False, **call)
        poison_tokens(group)
        return y

    came = trained(poisoned, mine)
    same(came, expected._replace(parameters=()))
    for parameter, grad in zip(layer.parameters(), expected.parameters, strict=True):
        assert torch.equal(parameter.grad, grad)
    assert group.statistics().exchanges == 2


def check_bytes(group: ep.Group, batch: Batch, exchanges: int) -> None:
    """Checks forwards whose tokens travel in 8 bits, other ones each time."""
    for number in range(exchanges):
        each = ep_cases.rounded(batch._replace(x=batch.x.roll(number, 0)))
        mine = each.of(group.rank)
        with torch.no_grad(), config(recipe=Float8Block()):
            y = ep_cases.part_of_8_bits(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
            group.check()
            expected = whole(group)(each.x, top_k_index=each.ids, top_k_weights=each.weights)
        assert torch.equal(y, expected[sum(batch.counts[: group.rank]) :][: len(y)])


@case
def faults_of_tokens_of_8_bits_are_seen(world: World) -> None:
    """Planted in one rank: scales of the token before, bytes of the exchange before, bytes behind the signal, no wait
    for the signals of others.
    """
    pack, write, meet = float8_rows.packed, SymmetricTransport._write_tokens, SymmetricLane.meet

    def other_scales(x: Tensor) -> Tensor:
        out = pack(x).view(torch.uint8)
        out[:, x.shape[1] :] = out[:, x.shape[1] :].roll(1, 0)
        return out.view(torch.bfloat16)

    def forgets(self: SymmetricTransport, lane: SymmetricLane, tokens: Tensor, exchange: Any) -> None:
        if exchange.number != 1:
            write(self, lane, tokens, exchange)

    def behind(self: SymmetricTransport, lane: SymmetricLane, tokens: Tensor, exchange: Any) -> None:
        late.append((self, lane, tokens, exchange))

    def signals(self: SymmetricLane, exchange: Any, kind: str, *rest: Any) -> None:
        meet(self, exchange, kind, *rest)
        if kind == "dispatch":
            dist.barrier()  # all have read what was there
            write(*late.pop()) if late else None

    def skips(self: SymmetricLane, exchange: Any, kind: str, *rest: Any) -> None:
        if kind == "dispatch":
            dist.barrier()
        if kind != "dispatch" or world.rank:
            meet(self, exchange, kind, *rest)

    def reads_first(self: SymmetricTransport, *arguments: Any) -> Tensor:
        rows = pulled(self, *arguments)
        dist.barrier()
        return rows

    late: list[Any] = []
    pulled, mine = SymmetricTransport._pulled, world.rank == 0
    group = world.group(dtype=torch.bfloat16, hidden=272)
    check_bytes(group, ep_cases.wide_batch(group, (13,) * world.size), 3)
    faults: tuple[tuple[int, tuple[tuple[Any, str, Any, bool], ...]], ...] = (
        (1, ((float8_rows, "packed", other_scales, mine),)),
        (3, ((SymmetricTransport, "_write_tokens", forgets, mine),)),
        (
            1,
            (
                (SymmetricTransport, "_write_tokens", behind, mine),
                (SymmetricLane, "meet", signals, mine),
                (SymmetricTransport, "_pulled", reads_first, not mine),
            ),
        ),
        (1, ((SymmetricLane, "meet", skips, True),)),
    )
    for exchanges, planted in faults:
        group = world.group(dtype=torch.bfloat16, hidden=272, timeout=2)
        batch = ep_cases.wide_batch(group, (13,) * world.size)
        poison_tokens(group)
        with ExitStack() as stack:
            stack.enter_context(caught(world))
            for where, name, fault, here in planted:
                if here:
                    stack.enter_context(patch.object(where, name, fault))
            check_bytes(group, batch, exchanges)


# ------------------------------------------------------------------------------------------------- what it promises


@case
def late_ranks_and_poisoned_buffers_change_nothing(world: World) -> None:
    group = world.group()
    lane, s = lane_of(group), group.settings
    dispatch, combine = ep.EPDispatch(group), ep.EPCombine(group)
    for number in range(12):  # every rank is late before both moves, alone and with another
        batch = batch_for(group, counts_of(world), number)
        valid = ((batch.ids < s.num_experts).sum(1, keepdim=True) * batch.x.round()).sum(0)
        mine = batch._replace(x=batch.x.round()).of(world.rank)
        lane.view("tokens", s.dtype, s.max_tokens, H).fill_(torch.nan)
        time.sleep(0.01 * (number % 3 == world.rank))
        rows, _, _, slots = dispatch(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        lane.view("rows", s.dtype, group.local_capacity or 0, H).fill_(torch.nan)
        time.sleep(0.01 * (number % 4 == world.rank))
        y = combine(rows, row_of_slot=slots)
        assert torch.equal(y, (mine.ids < s.num_experts).sum(1, keepdim=True) * mine.x)
        total = y.sum(0)
        dist.all_reduce(total)
        assert torch.equal(total, valid)


@case
def tokens_say_where_they_come_from(world: World) -> None:
    group = world.group(dtype=torch.bfloat16, num_experts=4 * world.size, hidden=16)
    lane, s = lane_of(group), group.settings

    def before(move: str, number: int) -> None:
        rows = {"tokens": s.max_tokens, "rows": group.local_capacity or 0}
        region = "tokens" if move == "dispatch" else "rows"
        lane.view(region, s.dtype, rows[region], s.hidden).fill_(torch.nan)
        time.sleep(0.005 * (number % 3 == world.rank))

    assert Carried(world, group, s.max_tokens, before).mismatches(12).tolist() == [0, 0]


@case
def a_token_of_the_exchange_before_is_seen(world: World) -> None:
    group = world.group(dtype=torch.bfloat16)
    write = SymmetricTransport._write_tokens

    def forgets(self: SymmetricTransport, lane: SymmetricLane, tokens: Tensor, exchange: Any) -> None:
        if (world.rank, exchange.number) != (0, 2):
            write(self, lane, tokens, exchange)

    with caught(world), patch.object(SymmetricTransport, "_write_tokens", forgets):
        wrong_words, _ = Carried(world, group, group.settings.max_tokens).mismatches(4).tolist()
        assert wrong_words == 0


@case
def rows_are_written_again_only_when_all_have_read_them(world: World) -> None:
    """A backward of the dispatch without one of the combine: no other meeting stands between two uses of the rows."""
    group = world.group()
    batch = batch_for(group, counts_of(world))
    mine = batch.of(world.rank)
    x = mine.x.clone().requires_grad_()
    for late in range(world.size):
        x.grad = None
        rows, _, _, slots = ep.EPDispatch(group)(x, top_k_index=mine.ids, top_k_weights=mine.weights)
        with kinds_met() as kinds:
            if world.rank == late:
                time.sleep(0.05)
            y = ep.EPCombine(group)(rows.detach(), row_of_slot=slots)
            rows.backward(torch.ones_like(rows))
        assert [kind & 0xFF for kind in kinds] == [1, 5, 3]  # combine, another use, dispatch backward
        count = (mine.ids < group.settings.num_experts).sum(1, keepdim=True)
        torch.testing.assert_close(y, count * mine.x)
        assert torch.equal(x.grad, count * torch.ones_like(mine.x))


@case
def gradients_are_read_before_a_replayed_graph_writes_tokens(world: World) -> None:
    """A replay asks no host what others still read; if inputs are frozen, no later move of a backward synchronises."""
    group, batch = world.group(), batch_for(world.group(), (13,) * world.size)
    expected, mine = trained(whole(group), batch).of(batch.counts, group), batch.of(world.rank)
    layer, pull = part(group), peers.pull
    y = layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)

    def late(*arguments: Any) -> None:
        if world.rank == 1:
            time.sleep(0.5)
        pull(*arguments)

    dist.barrier()
    with patch.object(peers, "pull", late):
        y.backward(mine.dy)
    lane_of(group)._read.clear()
    forward(group, mine._replace(x=-mine.x), layer)
    for parameter, gradient in zip(layer.parameters(), expected.parameters, strict=True):
        assert torch.equal(parameter.grad, gradient)


@contextmanager
def kinds_met() -> Iterator[list[int]]:
    """The kinds of the meetings in the body."""
    kinds: list[int] = []
    publish = peers.publish

    def watched(lane: Any, exchange: int, kind: int, *rest: Any) -> None:
        kinds.append(kind)
        publish(lane, exchange, kind, *rest)

    with patch.object(peers, "publish", watched):
        yield kinds


@case
def a_step_meets_twice_in_each_direction(world: World) -> None:
    group = world.group()
    mine = batch_for(group, counts_of(world)).of(world.rank)
    with kinds_met() as kinds:
        trained(part(group), mine)
    assert [kind & 0xFF for kind in kinds] == [0, 1, 2, 3, 4]  # the last: gradients of the weights


@case
def sums_on_few_multiprocessors_are_the_same(world: World) -> None:
    group = world.group()
    lane, mine = lane_of(group), batch_for(group, counts_of(world)).of(world.rank)
    rows, _, _, slots = ep.EPDispatch(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    table = group.lanes[0]._open
    assert table is not None
    y = ep.EPCombine(group)(rows, row_of_slot=slots)
    for blocks in (1, 3):
        again = torch.full_like(y, torch.nan)
        peers.pull_sum(lane.launch, 0, table.mine, lane.regions.rows, again, blocks)  # type: ignore[attr-defined]
        assert torch.equal(again, y)
    dist.barrier()


@case
def explain_names_the_moves(world: World) -> None:
    group = world.group()
    mine = batch_for(group, counts_of(world)).of(world.rank)
    said = str(part(group).explain(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights))
    assert "fusible (between ranks: dispatch)" in said
    assert "transport symmetric: as the group was asked for" in said


@case
def rows_come_first_where_the_first_product_would_not_wait(world: World) -> None:
    """The group has chosen to bring rows beside it; all ranks still send rows of the combine to slots."""
    with patch.object(overlap, "_LEAST_BYTES", 0), patch.object(overlap, "_BRINGING", 1):
        group = world.group(dtype=torch.bfloat16, capacity=2.0)
    batch, layer = batch_for(group, counts_of(world)), part(group)
    mine = batch.of(world.rank)
    call = {"top_k_index": mine.ids, "top_k_weights": mine.weights}
    assert group.mover.overlaps[:2] == (1, True)
    with patch.object(peers, "pull_blocks", side_effect=peers.pull_blocks) as by_blocks:
        check_step(group, batch)
        assert "overlap_combine=True (chosen)" in str(layer.explain(mine.x, **call))
        assert by_blocks.call_count == 1
        with config(recipe=Float8Block()):
            layer(mine.x, **call)
            assert "they are quantised for it, under Float8Block" in str(layer.explain(mine.x, **call))
        assert by_blocks.call_count == 1
        layer = part(group).float()
        with torch.autocast("cpu", torch.bfloat16):
            layer(mine.x, **call)
            assert "its weights are cast to torch.bfloat16 in between" in str(layer.explain(mine.x, **call))
        assert by_blocks.call_count == 1


@case
def tokens_elsewhere_are_refused(world: World) -> None:
    group = world.group()
    assert group.device == torch.device("cpu")
    group.device = torch.device("cpu", 1)
    mine = batch_for(group, counts_of(world)).of(world.rank)
    with raises(ArgumentError, "x must be on cpu:1, as the group's memory, got cpu; move it there"):
        forward(group, mine)


# ------------------------------------------------------------------------------------------------------- failures


@case
def a_row_too_many_is_an_error_at_the_next_call(world: World) -> None:
    required = largest(world)
    group = world.group(capacity=required - 1)
    batch = batch_for(group, counts_of(world))
    layer, mine = part(group), batch.of(world.rank)
    with unchecked(group):
        assert forward(group, mine, layer).isnan().all()
    for _ in range(2):
        with raises(ep.CapacityError, rf"dispatch of exchange 0 on lane 0: rank \d had to own {required} rows, its"):
            forward(group, mine, layer)
    group.reset()
    group.check()
    none = batch._replace(ids=torch.full_like(batch.ids, group.settings.num_experts))
    check_step(group, none, layer)
    assert group.statistics().required == required


@case
def a_rank_that_comes_late_is_an_error_and_others_live_on(world: World) -> None:
    group, other = world.group(timeout=4), world.group()
    mine = batch_for(group, counts_of(world)).of(world.rank)
    layer = part(group)
    dist.barrier()  # nobody is late on a busy machine
    forward(group, mine, layer)
    dist.barrier()
    if world.rank == 1:
        time.sleep(9)
    with unchecked(group):
        assert forward(group, mine, layer).isnan().all()
    words = r"rank \d did not take part in \w+ of exchange 1 on lane 0 within 4 s; of \d ranks, "
    with raises(ep.PeerError, words if world.rank == 1 else words.replace(r"\d did", "1 did", 1)):
        group.check()
    with raises(ep.PeerError, "did not take part in"):
        forward(group, mine, layer)
    with raises(ep.PeerError, "did not take part in"):
        group.reset()
    group.close()  # waits for nobody
    check_step(other, batch_for(other, counts_of(world)))


@case
def a_group_that_has_failed_unseen_closes_at_once(world: World) -> None:
    """The host has not read the failure yet. ``close()`` waits for the device, and for no rank."""
    group = world.group(timeout=1)
    mine, layer = batch_for(group, counts_of(world)).of(world.rank), part(group)
    dist.barrier()
    if world.rank == 1:
        time.sleep(12)
    with unchecked(group):
        forward(group, mine, layer)
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < 4
    with raises(ep.PeerError, "did not take part in"):
        forward(group, mine, layer)
    dist.barrier()


@case
def ranks_that_do_other_things_are_told(world: World) -> None:
    group = world.group(timeout=5)
    mine = batch_for(group, counts_of(world)).of(world.rank)
    layer = part(group)
    y = layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    with unchecked(group):
        if world.rank:
            forward(group, mine, layer)
        else:
            y.backward(mine.dy)
    with raises(ep.PeerError, r"rank \d is at (combine backward|dispatch) on lane 0, this rank at .*the same layers"):
        group.check()


@case
def ranks_that_want_other_gradients_are_told(world: World) -> None:
    group = world.group()
    mine = batch_for(group, counts_of(world)).of(world.rank)
    x = mine.x.requires_grad_(world.rank == 0)
    with unchecked(group):
        part(group)(x, top_k_index=mine.ids, top_k_weights=mine.weights)
    with raises(ep.PeerError, r"rank \d wants gradients of \w+ in dispatch of exchange 0 .*set requires_grad alike"):
        group.check()


# ------------------------------------------------------------------------------------------------- planted faults


@contextmanager
def caught(world: World) -> Iterator[None]:
    """A rank at least sees what goes wrong in the body."""
    seen = False
    try:
        yield
    except (AssertionError, ep.PeerError):
        seen = True
    seen_by: list[Any] = [None] * world.size
    dist.all_gather_object(seen_by, seen)
    assert any(seen_by), "no rank saw the fault"


def check_sums(group: ep.Group, batch: Batch) -> None:
    """Checks the sums of a forward."""
    expected = trained(whole(group), batch).of(batch.counts, group)
    y = forward(group, batch.of(group.rank))
    group.check()
    same(Results(y, expected.dx, expected.dweights, ()), expected._replace(parameters=()))


@case
def no_fault_no_error(world: World) -> None:
    """The checks that detect planted faults pass without one."""
    group = world.group()
    check_sums(group, batch_for(group, counts_of(world)))


@case
def a_signal_before_the_copy_is_seen(world: World) -> None:
    group = world.group()
    lane, write = lane_of(group), SymmetricTransport._write_tokens
    meet, pulled = SymmetricLane.meet, SymmetricTransport._pulled

    def meets_first(self: SymmetricLane, exchange: Any, kind: str, *rest: Any) -> None:
        meet(self, exchange, kind, *rest)
        if kind == "dispatch" and world.rank == 0:
            dist.barrier()  # the others have read
            write(group.mover, lane, batch.of(0).x, exchange)

    def tells(self: SymmetricTransport, *arguments: Any) -> Tensor:
        rows = pulled(self, *arguments)
        if world.rank:
            dist.barrier()
        return rows

    batch = batch_for(group, counts_of(world))
    copies_late = (lambda *_: None) if world.rank == 0 else write
    with (
        caught(world),
        patch.object(SymmetricTransport, "_write_tokens", copies_late),
        patch.object(SymmetricLane, "meet", meets_first),
        patch.object(SymmetricTransport, "_pulled", tells),
    ):
        check_sums(group, batch)


@case
def a_rank_that_does_not_wait_is_seen(world: World) -> None:
    group = world.group(timeout=1)
    meet = SymmetricLane.meet

    def skips(self: SymmetricLane, exchange: Any, kind: str, *rest: Any) -> None:
        if kind == "dispatch" and world.rank == 0:
            dist.barrier()  # the others wait
        elif kind == "dispatch":
            dist.barrier()
            meet(self, exchange, kind, *rest)
        else:
            meet(self, exchange, kind, *rest)

    with caught(world), patch.object(SymmetricLane, "meet", skips):
        check_sums(group, batch_for(group, counts_of(world)))


@case
def a_signal_of_the_other_parity_is_seen(world: World) -> None:
    group = world.group(timeout=1)
    if world.rank == 0:
        lane_of(group).launch.state[0] += 1  # as if it had given one signal more
    with caught(world):
        check_sums(group, batch_for(group, counts_of(world)))


@case
def a_rank_that_skips_an_exchange_is_seen(world: World) -> None:
    group = world.group(timeout=1)
    batch = batch_for(group, counts_of(world))
    with caught(world):
        if world.rank:
            forward(group, batch.of(world.rank))
        check_sums(group, batch)


@case
def a_rank_that_keeps_a_row_too_few_is_seen(world: World) -> None:
    group = world.group(capacity=3 * sum(counts_of(world)) - 1, overflow="drop")
    divide, table_of = peers.divide_rows, SymmetricTransport._table
    batch = batch_for(group, counts_of(world))
    batch = batch._replace(ids=torch.zeros_like(batch.ids))  # rank 0 owns all, and has no room for the last

    def keeps_fewer(lane: Any, exchange: int, sizes: Tensor, rows: int, fails: bool) -> Any:
        return divide(lane, exchange, sizes, rows - (world.rank == 0), fails)

    def table(self: SymmetricTransport, *arguments: Any) -> Any:
        right, slot_of_row = table_of(self, *arguments)
        fewer = right.slots._replace(capacity=right.slots.capacity - (world.rank == 0))
        return right._replace(slots=fewer), slot_of_row

    expected = trained(whole(group), ep_cases.without_overflow(group, batch)).of(batch.counts, group)
    fault = patch.multiple(peers, divide_rows=keeps_fewer), patch.multiple(SymmetricTransport, _table=table)
    with caught(world), fault[0], fault[1]:
        y = forward(group, batch.of(world.rank))
        same(Results(y, expected.dx, expected.dweights, ()), expected._replace(parameters=()))
