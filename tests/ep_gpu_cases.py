"""The transport ``symmetric`` over the links of GPUs, a rank each; see ``ep_world``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from ep_cases import batch_for, counts_of, largest, raises
from ep_symmetric_cases import unchecked
from ep_world import Batch, World, check_step, part, same, trained, whole
from torch import Tensor
from torch import distributed as dist

from fusible import config, ep
from fusible.benchmarks import expert_parallel
from fusible.benchmarks.problem import PRESETS
from fusible.ops.ep.symmetric import SymmetricTransport

CASES: list[Callable[[World], None]] = []
BF16 = {"dtype": torch.bfloat16, "timeout": 8.0}


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


@case
def steps_give_the_bits_of_one_gpu(world: World) -> None:
    for dtype, overlap in ((torch.bfloat16, 0), (torch.float16, 0), (torch.bfloat16, 16)):
        for capacity in (2.0, "worst", 13 * 3 * world.size):
            group = world.group(**{**BF16, "dtype": dtype, "capacity": capacity, "overlap": overlap})
            for seed, counts in enumerate((counts_of(world), (0,) * world.size, (13,) * world.size)):
                check_step(group, batch_for(group, counts, seed))
            with config(disable_fusions=frozenset({"EPGroupedMLP"})):
                check_step(group, batch_for(group, counts_of(world), 3))
            group.check(synchronize=True)
            group.close()


@case
def layers_of_models_give_the_bits_of_one_gpu(world: World) -> None:
    for preset, tokens in (("small", 700), ("qwen3", 900), ("mixtral", 300)):
        found = []
        for transport in ("symmetric", "collective"):
            setting = expert_parallel.Setting(
                *(preset, world.size, tokens, "bf16", "cuda", "skewed", "exact", transport, 0, 1, True)
            )
            group = group_of(world, preset, tokens, transport)
            found.append(expert_parallel.differences(setting, group))
            group.close()
        assert found[0] == found[1], (preset, found)
        assert found[0]["y"] == found[0]["dx"] == 0, (preset, found)


def group_of(world: World, preset: str, tokens: int, transport: str = "symmetric", overlap: int = 0) -> ep.Group:
    sizes = PRESETS[preset]
    return ep.Group(
        num_experts=sizes.experts, max_tokens=tokens, top_k=sizes.top_k, hidden=sizes.features, dtype=torch.bfloat16,
        capacity="worst", transport=transport, timeout=8, overlap=overlap,
    )  # fmt: skip


@case
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
    """Each sum is known: k times a token, whose elements tell its exchange, its rank and itself."""
    tokens, exchanges = 256, 4000
    group = group_of(world, "qwen3", tokens)
    dispatch, combine, k = ep.EPDispatch(group), ep.EPCombine(group), group.settings.top_k
    lane = poisoned_lane(group)
    wrong = torch.zeros((), dtype=torch.int64)
    token = torch.arange(tokens).unsqueeze(1)
    column = torch.arange(group.settings.hidden)
    weights = torch.ones(tokens, k)
    torch.manual_seed(world.rank)
    for number in range(exchanges):
        x = ((7 * number + 31 * world.rank + token * 5 + column) % 251).to(torch.bfloat16)
        ids = torch.rand(tokens, group.settings.num_experts).topk(k).indices
        if number % 97 == world.rank:
            torch.cuda._sleep(2_000_000)
        lane("tokens")
        with torch.no_grad():
            rows, _, _, slots = dispatch(x, top_k_index=ids, top_k_weights=weights)
            if number % 89 == world.rank:
                torch.cuda._sleep(1_000_000)
            lane("rows")
            y = combine(rows, row_of_slot=slots)
        wrong += (y != k * x).sum()
    group.check(synchronize=True)
    assert int(wrong) == 0, f"{int(wrong)} elements"
    assert group.statistics().exchanges == exchanges
    group.close()


def poisoned_lane(group: ep.Group) -> Callable[[str], None]:
    """Writes NaN to a region of this rank."""
    mover, s = group.mover, group.settings
    assert isinstance(mover, SymmetricTransport)
    lane, rows = mover._lanes[0], {"tokens": s.max_tokens, "rows": group.local_capacity or 0}
    return lambda region: lane.view(region, s.dtype, rows[region], s.hidden).fill_(torch.nan)


@case
def graphs_are_replayed_with_other_ids(world: World) -> None:
    for overlap in (0, 16):
        check_graphs(world, overlap)


def check_graphs(world: World, overlap: int) -> None:
    torch.manual_seed(world.rank)
    group = group_of(world, "small", 96, overlap=overlap)
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
def rows_too_many_raise_later_and_the_group_goes_on(world: World) -> None:
    with another_group_lives_on(world):
        required = largest(world)
        group = world.group(capacity=required - 1, **BF16)
        batch = batch_for(group, counts_of(world))
        layer, mine = part(group), batch.of(world.rank)
        with unchecked(group):
            y = layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        for _ in range(2):
            with raises(ep.CapacityError, rf"rank \d had to own {required} rows, its capacity is {required - 1}"):
                group.check(synchronize=True)
        assert y.isnan().all()
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
        group = world.group(**{**BF16, "timeout": 1.0})
        batch = batch_for(group, counts_of(world))
        layer, mine = part(group), batch.of(world.rank)
        same(trained(layer, mine), trained(whole(group), batch).of(batch.counts, group))
        if world.rank == 1:
            time.sleep(3)
        with unchecked(group):
            y = layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        with raises(ep.PeerError, r"rank \d did not take part in \w+ of exchange 1 on lane 0 within 1.0 s"):
            group.check(synchronize=True)
        assert y.isnan().all()
        with raises(ep.PeerError, "did not take part"):
            layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        dist.barrier()


@case
def ranks_that_want_other_gradients(world: World) -> None:
    group = world.group(**BF16)
    mine: Batch = batch_for(group, counts_of(world)).of(world.rank)
    with unchecked(group):
        part(group)(mine.x.requires_grad_(world.rank == 0), top_k_index=mine.ids, top_k_weights=mine.weights)
    with raises(ep.PeerError, r"rank \d wants gradients of \w+ in dispatch of exchange 0 .*set requires_grad alike"):
        group.check(synchronize=True)
