"""Test cases of expert parallelism on several GPUs, one rank each; see ``ep_world`` and ``ep_proof``.

On CPUs the same cases run in a small extent, but for those that need a GPU's queues. ``ep_long_cases`` has more of two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from ep_carried import Carried
from ep_cases import (
    batch_for,
    check_checkpoints,
    counts_of,
    gradients_of_8_bits_are_rounded_before_they_are_sent,
    largest,
    of_one_owner,
    raises,
    tokens_of_8_bits_are_the_rows_of_their_recipe,
)
from ep_training import HIDDEN, assert_same_curve
from ep_world import Batch, World, check_step, part, same, trained, unchecked, whole
from torch import Tensor
from torch import distributed as dist

from fusible import config, ep
from fusible.benchmarks import expert_parallel
from fusible.benchmarks.problem import PRESETS
from fusible.ops.ep.symmetric import SymmetricTransport


class Extent(NamedTuple):
    """How much of each case is run.

    Attributes:
        exchanges, steps: of exchanges that are checked, and of training.
        capacities: of the groups whose steps are compared with those of one process.
        problems: presets, and tokens of each rank.
        patience: seconds to wait for a rank that sleeps.
    """

    device: str
    exchanges: int
    steps: int
    capacities: tuple[float | str, ...]
    problems: tuple[tuple[str, int], ...]
    patience: float


HERE = (
    Extent("cuda", 2_000, 150, (2.0, "worst", 200), (("small", 700), ("qwen3", 900), ("mixtral", 300)), 1.0)
    if torch.cuda.is_available()
    else Extent("cpu", 12, 6, (2.0,), (("small", 8),), 4.0)
)
CASES: list[Callable[[World], None]] = []
NEED_GPUS: list[Callable[[World], None]] = []
BF16 = {"dtype": torch.bfloat16, "timeout": 8.0 if HERE.device == "cuda" else 60.0}
OFF = {"overlap_dispatch": 0, "overlap_combine": False}
OVERLAPS = ({}, OFF, {"overlap": 16}, {"overlap_dispatch": 8}, {"overlap_dispatch": 8, "overlap_combine": True})


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


def case_for_gpus(function: Callable[[World], None]) -> Callable[[World], None]:
    """One that asks what only a GPU can answer."""
    NEED_GPUS.append(function)
    return case(function) if HERE.device == "cuda" else function


def sleep(milliseconds: float) -> None:
    """Sleeps on the device, while the host goes ahead."""
    if HERE.device == "cuda":
        torch.cuda._sleep(int(milliseconds * 1e6))
    else:
        time.sleep(milliseconds / 1000)


@case
def steps_give_the_bits_of_one_gpu(world: World) -> None:
    for dtype, overlap in (*((torch.bfloat16, overlap) for overlap in OVERLAPS), (torch.float16, {})):
        for capacity in HERE.capacities:
            group = world.group(**{**BF16, "dtype": dtype, "capacity": capacity, **overlap})
            for seed, counts in enumerate((counts_of(world), (0,) * world.size, (13,) * world.size)):
                check_step(group, batch_for(group, counts, seed))
            with config(disable_fusions=frozenset({"EPGroupedMLP"})):
                check_step(group, batch_for(group, counts_of(world), 3))
            group.check(synchronize=True)
            group.close()


@case
def sums_by_rank_are_near_those_of_one_gpu_and_repeat(world: World) -> None:
    for overlap in ({}, {"overlap_dispatch": 0}, {"overlap": 16}, {"overlap_dispatch": 8}):
        group = world.group(**BF16, combine="reduced", **overlap)
        for seed, counts in enumerate((counts_of(world), (0,) * world.size, (13,) * world.size)):
            check_step(group, of_one_owner(group, counts, seed))
            batch = batch_for(group, counts, seed)
            came = trained(part(group), batch.of(world.rank))
            expected = trained(whole(group), batch).of(batch.counts, group)
            same(trained(part(group), batch.of(world.rank)), came)
            same(came, expected._replace(y=came.y, dx=came.dx))
            for ours, exact in ((came.y, expected.y), (came.dx, expected.dx)):
                torch.testing.assert_close(ours, exact, rtol=2e-2, atol=2e-2)
        group.check(synchronize=True)
        group.close()


case(tokens_of_8_bits_are_the_rows_of_their_recipe)
case(gradients_of_8_bits_are_rounded_before_they_are_sent)


@case
def checkpoints_give_gradients_of_the_routing_that_they_compute_again(world: World) -> None:
    for capacity in HERE.capacities:
        group = world.group(**BF16, capacity=capacity)
        check_checkpoints(world, group)
        group.check(synchronize=True)
        group.close()


@case
def layers_of_models_give_the_bits_of_one_gpu(world: World) -> None:
    for preset, tokens in HERE.problems:
        found = []
        for transport in (world.transport, "collective"):
            setting = expert_parallel.Setting(
                *(preset, world.size, tokens, "bf16", HERE.device, "skewed", "exact", transport, 0, 1, True)
            )
            group = group_of(world, preset, tokens, transport)
            found.append(expert_parallel.differences(setting, group))
            group.close()
        assert found[0] == found[1], (preset, found)
        assert found[0]["y"] == found[0]["dx"] == 0, (preset, found)


def group_of(world: World, preset: str, tokens: int, transport: str = "", **overlap: int) -> ep.Group:
    sizes = PRESETS[preset]
    return ep.Group(
        num_experts=sizes.experts, max_tokens=tokens, top_k=sizes.top_k, hidden=sizes.features,
        capacity="worst", transport=transport or world.transport, **overlap, **BF16,
    )  # fmt: skip


@case
def a_model_trains_as_in_one_process(world: World) -> None:
    train(world, HERE.steps)


def train(world: World, steps: int) -> None:
    """So many steps of a model whose experts are spread over ranks, beside those of one process."""
    group = world.group(**{**BF16, "hidden": HIDDEN, "max_tokens": 64, "capacity": "worst"})
    assert_same_curve(world, group, steps)
    group.close()


@case_for_gpus
def a_step_asks_nothing_of_the_host(world: World) -> None:
    group = group_of(world, "small", 64)
    layer, (x, ids, weights, dy) = part_of(group), inputs(group, 64)
    for waits in ("default", "error"):
        torch.cuda.set_sync_debug_mode(waits)
        try:
            y = layer(x, top_k_index=ids, top_k_weights=weights)
            torch.autograd.grad(y, [x, weights, *layer.parameters()], dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    group.check(synchronize=True)


def part_of(group: ep.Group) -> torch.nn.Module:
    return expert_parallel.layer(
        *(ep.EPDispatch(group), ep.EPCombine(group), PRESETS["small"], group.local_experts, torch.bfloat16),
        torch.get_default_device(),
    )


def inputs(group: ep.Group, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = group.settings
    x, dy = torch.randn(2, tokens, s.hidden, dtype=s.dtype)
    ids = torch.rand(tokens, s.num_experts).topk(s.top_k).indices
    return x.requires_grad_(), ids, torch.rand(tokens, s.top_k).requires_grad_(), dy


@case
def thousands_of_exchanges_through_poisoned_buffers(world: World) -> None:
    exchange(world, HERE.exchanges)


def exchange(world: World, exchanges: int) -> None:
    """Each row and each sum is known: tokens carry their exchange, their rank and themselves in every 16 bytes."""
    tokens = 256 if HERE.device == "cuda" else 16
    group = group_of(world, "qwen3" if HERE.device == "cuda" else "small", tokens)
    poison = poisoned_lane(group)

    def before(move: str, number: int) -> None:
        poison("tokens" if move == "dispatch" else "rows")
        if number % (97 if move == "dispatch" else 89) == world.rank:
            sleep(1)

    wrong = Carried(world, group, tokens, before).mismatches(exchanges)
    group.check(synchronize=True)
    assert wrong.tolist() == [0, 0], f"{wrong.tolist()} words of rows and elements of sums"
    assert group.statistics().exchanges == exchanges
    group.close()


def poisoned_lane(group: ep.Group) -> Callable[[str], None]:
    """Writes NaN to a region of this rank, where it has some."""
    mover, s = group.mover, group.settings
    if not isinstance(mover, SymmetricTransport):
        return lambda region: None
    lane, rows = mover._lanes[0], {"tokens": s.max_tokens, "rows": group.local_capacity or 0}
    return lambda region: lane.view(region, s.dtype, rows[region], s.hidden).fill_(torch.nan)


@case_for_gpus
def graphs_are_replayed_with_other_ids(world: World) -> None:
    for overlap in OVERLAPS:
        check_graphs(world, overlap)


def check_graphs(world: World, overlap: dict[str, int]) -> None:
    torch.manual_seed(world.rank)
    group = group_of(world, "small", 96, **overlap)
    layer, static = part_of(group), inputs(group, 96)
    x, ids, weights, dy = static

    def step() -> tuple[Tensor, ...]:
        y = layer(x, top_k_index=ids, top_k_weights=weights)
        return (y, *torch.autograd.grad(y, [x, weights, *layer.parameters()], dy))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(20):
        with torch.no_grad():
            for to, of in zip(static, inputs(group, 96), strict=True):
                to.copy_(of)
        graph.replay()
        came = [each.clone() for each in captured]
        for a, b in zip(came, step(), strict=True):
            assert torch.equal(a, b)
    group.check(synchronize=True)


@contextmanager
def another_group_lives_on(world: World) -> Iterator[None]:
    other = world.group(**BF16)
    check_step(other, batch_for(other, counts_of(world)))
    yield
    check_step(other, batch_for(other, counts_of(world), 1))
    other.check(synchronize=True)


@case
def rows_too_many_raise_and_the_group_goes_on(world: World) -> None:
    with another_group_lives_on(world):
        required = largest(world)
        group = world.group(capacity=required - 1, **BF16)
        batch = batch_for(group, counts_of(world))
        layer, mine = part(group), batch.of(world.rank)
        for _ in range(2):
            with raises(ep.CapacityError, rf"rank \d had to own {required} rows, its capacity is {required - 1}"):
                layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
                group.check(synchronize=True)
        group.reset()
        none = batch._replace(ids=torch.full_like(batch.ids, group.settings.num_experts))
        check_step(group, none, layer)
        group.check(synchronize=True)
        exact = world.group(capacity=required, **BF16)
        check_step(exact, batch)
        dropping = world.group(capacity=required - 1, overflow="drop", **BF16)
        trained(part(dropping), mine)
        assert dropping.statistics().required == required
        assert dropping.statistics().dropped > 0


@case
def a_rank_that_sleeps_is_an_error_and_the_process_lives_on(world: World) -> None:
    with another_group_lives_on(world):
        patience = HERE.patience
        apart = dist.new_group() if world.transport == "collective" else None  # one that fails closes its connections
        group = world.group(process_group=apart, **{**BF16, "timeout": patience})
        batch = batch_for(group, counts_of(world))
        layer, mine = part(group), batch.of(world.rank)
        dist.barrier()  # nobody is late on a busy machine
        same(trained(layer, mine), trained(whole(group), batch).of(batch.counts, group))
        group.check(synchronize=True)
        dist.barrier()
        if world.rank == 1:
            time.sleep(3 * patience)
        with raises(ep.PeerError, r"rank \w* ?did not take part in \w+ of exchange 1 on lane 0"), unchecked(group):
            y = layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
            type(group).check(group, synchronize=True)
        if world.transport == "symmetric":
            assert y.isnan().all()
        with raises(ep.PeerError, "did not take part"):
            layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        dist.barrier()


@case
def ranks_that_want_other_gradients(world: World) -> None:
    group = world.group(**BF16)
    mine: Batch = batch_for(group, counts_of(world)).of(world.rank)
    with raises(ep.PeerError, r"rank \d wants gradients of \w+ in dispatch of exchange 0 .*set requires_grad alike"):
        part(group)(mine.x.requires_grad_(world.rank == 0), top_k_index=mine.ids, top_k_weights=mine.weights)
        group.check(synchronize=True)
