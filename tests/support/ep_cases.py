"""Test cases that every rank of an expert-parallel group runs; see ``ep_world``."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ep_world import Batch, H, Results, World, check_step, experts, part, same, trained, unchecked, whole
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import CheckpointError, checkpoint

from fusible import (
    MXFP8,
    ArgumentError,
    Delayed,
    Float8Block,
    Float8Tensor,
    GroupedLinear,
    QuantizedGroupedTensor,
    Scale,
    ScaledSwiGLU,
    Sequential,
    SwiGLU,
    config,
    ep,
)
from fusible.benchmarks import expert_parallel, vdev
from fusible.benchmarks.problem import PRESETS, InaccurateError
from fusible.ops import kernels
from fusible.ops.ep import memory
from fusible.ops.ep.collective import CollectiveTable, CollectiveTransport
from fusible.ops.ep.symmetric import SymmetricTransport
from fusible.ops.formats.quantized_tokens import QuantizedTokens
from fusible.ops.kernels.doors import routing
from fusible.ops.routed.call import RoutedCall

CASES: list[Callable[[World], None]] = []


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


@contextmanager
def raises(kind: type[Exception] | tuple[type[Exception], ...], words: str) -> Iterator[None]:
    with pytest.raises(kind, match=words):
        yield


def counts_of(world: World) -> tuple[int, ...]:
    """Tokens by rank: all different, and none on the second rank."""
    return (7, 0, 13, 5)[: world.size]


def batch_for(group: ep.Group, counts: tuple[int, ...], seed: int = 0) -> Batch:
    s = group.settings
    return Batch.random(counts, s.num_experts, s.top_k, s.dtype, seed)


def of_one_owner(group: ep.Group, counts: tuple[int, ...], seed: int = 0) -> Batch:
    """Tokens whose experts are all on one rank, a rank after the other."""
    batch, owned = batch_for(group, counts, seed), group.num_local_experts
    owners = torch.arange(len(batch.x)).unsqueeze(1) % group.size
    return batch._replace(ids=owners * owned + batch.ids % owned)


# ------------------------------------------------------------------------------------------------ one GPU's bits


@case
def a_step_gives_the_bits_of_one_process(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for capacity in (2.0, "exact", "worst", 13 * 3 * world.size):
            group = world.group(dtype=dtype, capacity=capacity)
            check_step(group, batch_for(group, counts_of(world)))
            assert group.statistics().exchanges == 1
            assert group.statistics().dropped == 0


@case
def no_rank_has_tokens(world: World) -> None:
    for capacity in (2.0, "exact"):
        group = world.group(capacity=capacity)
        check_step(group, batch_for(group, (0,) * world.size))


@case
def one_expert_takes_all(world: World) -> None:
    for capacity in ("exact", "worst"):
        group = world.group(capacity=capacity)
        batch = batch_for(group, counts_of(world))
        check_step(group, batch._replace(ids=torch.full_like(batch.ids, group.settings.num_experts - 1)))


@case
def all_ids_are_of_no_expert(world: World) -> None:
    group = world.group(capacity="exact")
    batch = batch_for(group, counts_of(world))
    check_step(group, batch._replace(ids=torch.full_like(batch.ids, group.settings.num_experts)))
    negative = batch.of(world.rank)._replace(ids=torch.full_like(batch.of(world.rank).ids, -1))
    came = trained(part(group), negative)
    assert not came.y.any()
    assert not came.dx.any()
    assert not came.dweights.any()


@case
def negative_ids_are_of_no_expert(world: World) -> None:
    group = world.group()
    batch = batch_for(group, counts_of(world))
    none = batch.ids == group.settings.num_experts
    expected = trained(whole(group), batch).of(batch.counts, group)
    mine = batch._replace(ids=torch.where(none, -3, batch.ids)).of(world.rank)
    same(trained(part(group), mine), expected)


@case
def an_expert_a_rank_and_one_slot_a_token(world: World) -> None:
    group = world.group(num_experts=world.size, top_k=1)
    check_step(group, batch_for(group, counts_of(world)))


@case
def experts_of_all_ranks_are_hundreds(world: World) -> None:
    for number, top_k in ((512, 1), (896, 16), (2048, 22), (4096, 32)):
        group = world.group(num_experts=number, top_k=top_k)
        check_step(group, batch_for(group, counts_of(world)))


@case
def ids_of_32_bits_and_weights_of_other_dtypes(world: World) -> None:
    group = world.group()
    batch = batch_for(group, counts_of(world))
    check_step(group, batch._replace(ids=batch.ids.int()))
    for dtype in (torch.bfloat16, torch.float64):
        check_step(group, batch._replace(weights=batch.weights.to(dtype)))


@case
def unfused_ops_give_the_same(world: World) -> None:
    group = world.group()
    for fusions in ({"EPGroupedMLP"}, {"EPGroupedMLP", "GroupedMLP", "RoutedMLP"}):
        with config(disable_fusions=frozenset(fusions)):
            check_step(group, batch_for(group, counts_of(world)))


@case
def ranks_may_differ_in_what_they_fuse(world: World) -> None:
    group = world.group()
    batch = batch_for(group, counts_of(world))
    expected = trained(whole(group), batch).of(batch.counts, group)
    with config(disable_fusions=frozenset({"EPGroupedMLP"} if world.rank == 0 else ())):
        same(trained(part(group), batch.of(world.rank)), expected)


@case
def only_the_experts_are_fused_where_groups_or_lanes_differ(world: World) -> None:
    first, second = world.group(lanes=2), world.group()
    mine = batch_for(first, counts_of(world)).of(world.rank)
    call = {"x": mine.x, "top_k_index": mine.ids, "top_k_weights": mine.weights}
    for last, reason in (
        (ep.EPCombine(second), "dispatch and combine are of different groups"),
        (ep.EPCombine(first, 1), "dispatch and combine use different lanes"),
        (ep.EPCombine(first), ""),
    ):
        layer = experts(ep.EPDispatch(first), first.num_local_experts, last)
        said = layer.explain(**call)
        assert [s.name for s in said.steps] == (
            ["EPDispatch", "GroupedMLP", "EPCombine"] if reason else ["EPGroupedMLP"]
        )
        assert not reason or reason in [fusion.reason for fusion in said.fusions]


@case
def other_places_of_the_scale_are_fused_too(world: World) -> None:
    group = world.group(dtype=torch.bfloat16)
    batch = batch_for(group, counts_of(world))
    for behind in ((ScaledSwiGLU,), (SwiGLU, None, Scale), (SwiGLU, None)):
        layers = []
        for of in (whole(group), part(group)):
            activation, *scale = [kind and kind() for kind in behind]
            inside = [of[1], activation, of[4], *[op for op in scale if op is not None]]
            layers.append(Sequential(of[0], *inside, of[5]))
        expected = trained(layers[0], batch).of(batch.counts, group)
        same(trained(layers[1], batch.of(world.rank)), expected)
        assert [s.name for s in layers[1].explain().steps] == ["EPGroupedMLP"]


@case
def delayed_scales_are_those_of_each_linear(world: World) -> None:
    group = world.group(dtype=torch.bfloat16)
    mine = batch_for(group, counts_of(world)).of(world.rank)
    call = {"top_k_index": mine.ids, "top_k_weights": mine.weights}
    options = {"dtype": torch.bfloat16, "recipe": Float8Tensor(delayed=Delayed(history=2))}

    def after_two_steps(fusions: set[str]) -> tuple[list[str], dict[str, torch.Tensor]]:
        torch.manual_seed(world.rank)
        up, down = (GroupedLinear(group.num_local_experts, *sides, **options) for sides in ((H, 2 * H), (H, H)))
        layer, x = Sequential(ep.EPDispatch(group), up, SwiGLU(), Scale(), down, ep.EPCombine(group)), mine.x.detach()
        with config(disable_fusions=fusions):
            for _ in range(2):
                y = layer(x.requires_grad_(), **call)
                y.sum().backward()
            shown = [step.name for step in layer.explain(x, **call).steps]
        return shown, {"y": y.detach(), **{n: p.grad for n, p in layer.named_parameters()}, **layer.state_dict()}

    (shown, ours), (_, theirs) = after_two_steps(set()), after_two_steps({"EPGroupedMLP", "GroupedMLP"})
    assert shown == ["EPGroupedMLP"]
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def part_of_8_bits(group: ep.Group, lane: int = 0) -> Sequential:
    """The part of a rank, to which tokens travel in 8 bits."""
    layer = part(group, lane)
    layer[0] = ep.EPDispatch(group, lane, Float8Block())
    return layer


def wide_batch(group: ep.Group, counts: tuple[int, ...], seed: int = 0) -> Batch:
    """Tokens as wide as the group's, whose magnitudes differ by 40 powers of two, and by 6 from block to block."""
    batch, columns = batch_for(group, counts, seed), group.settings.hidden
    draw = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):  # the same numbers wherever they go
        x, dy = (torch.randn(len(batch.x), columns, generator=draw) for _ in range(2))
        x = x * torch.logspace(-20, 20, len(x), base=2.0)[:, None] * torch.exp2(torch.arange(columns) // 128 * 6.0)
    return batch._replace(x=x.to(batch.x), dy=dy.to(batch.x))


def rounded(batch: Batch) -> Batch:
    """Tokens with the values that they have in 8 bits."""
    tokens = QuantizedGroupedTensor.quantize(batch.x, Float8Block(), torch.tensor([len(batch.x)]))
    return batch._replace(x=tokens.dequantize())


@case
def tokens_of_8_bits_are_the_rows_of_their_recipe(world: World) -> None:
    """A step has the bits of one process whose tokens were rounded before, by fused and by unfused ops."""
    recipes = (None, Float8Block(), Float8Block(wgrad="bfloat16"), Float8Block(scales="float32"))  # of the linears
    for recipe, hidden in itertools.product(recipes, (H, 272)):
        group = world.group(dtype=torch.bfloat16, hidden=hidden)
        batch = wide_batch(group, counts_of(world))
        with config(recipe=recipe):
            expected = trained(whole(group), rounded(batch)).of(batch.counts, group)
            for fusions in (set(), {"EPGroupedMLP", "GroupedMLP"}):
                with config(disable_fusions=fusions):
                    same(trained(part_of_8_bits(group), batch.of(world.rank)), expected)


@case
def gradients_of_8_bits_are_rounded_before_they_are_sent(world: World) -> None:
    """A step has the bits of one process whose gradients were rounded before, by fused and by unfused ops."""
    for recipe, hidden in itertools.product((None, Float8Block()), (H, 272)):
        group = world.group(dtype=torch.bfloat16, hidden=hidden, float8_gradients=True)
        batch = wide_batch(group, counts_of(world))
        batch = batch._replace(x=batch.dy, dy=batch.x)  # which has magnitudes of all kinds
        with config(recipe=recipe):
            expected = trained(whole(group), batch._replace(dy=rounded(batch._replace(x=batch.dy)).x))
            for fusions in (set(), {"EPGroupedMLP", "GroupedMLP"}):
                with config(disable_fusions=fusions):
                    same(trained(part(group), batch.of(world.rank)), expected.of(batch.counts, group))
    said = part(group).explain(batch.x[:1], top_k_index=batch.ids[:1], top_k_weights=batch.weights[:1])
    assert "gradients of combined tokens are quantised before they travel" in str(said)


@case
def tokens_of_8_bits_are_within_half_a_step(world: World) -> None:
    """Rows are tokens to half a step of e4m3, or of the smallest step of their block; sums are near float64's."""
    group = world.group(dtype=torch.bfloat16, hidden=272)
    batch = batch_for(group, counts_of(world))
    x = torch.randn(len(batch.x), 272, generator=torch.Generator().manual_seed(4)).bfloat16()
    mine = batch._replace(x=x, dy=x, ids=batch.ids.clamp(max=group.settings.num_experts - 1)).of(world.rank)
    ends = Sequential(ep.EPDispatch(group, recipe=Float8Block()), ep.EPCombine(group))
    sums = ends(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)  # of three rows, rounded once
    exact, largest = mine.x.double(), nn.functional.pad(mine.x.double().abs(), (0, 112)).unflatten(1, (3, 128)).amax(2)
    step = torch.maximum(exact.abs() * 2**-4, largest.repeat_interleave(128, 1)[:, :272] * 2**-16)
    assert ((sums.double() / 3 - exact).abs() <= step + exact.abs() * 2**-8).all()
    with config(recipe=Float8Block()):
        y = part_of_8_bits(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    truth = whole(group).double()(exact, top_k_index=mine.ids, top_k_weights=mine.weights.double())
    assert (y.double() - truth).norm() <= 0.07 * truth.norm()


@case
def rows_of_8_bits_are_not_quantised_again(world: World) -> None:
    """Without gradients nothing reads the values of rows; a product whose recipe is another one does."""
    group = world.group(dtype=torch.bfloat16, hidden=272)
    mine = wide_batch(group, counts_of(world)).of(world.rank)
    call, layer = {"top_k_index": mine.ids, "top_k_weights": mine.weights}, part_of_8_bits(group)
    for recipe, dequantised in ((Float8Block(), 0), (Float8Block(scales="float32"), 1), (None, 1)):
        with (
            config(recipe=recipe),
            torch.no_grad(),
            patch.object(QuantizedTokens, "values", autospec=True, side_effect=QuantizedTokens.values) as read,
        ):
            layer(mine.x, **call)
            assert read.call_count == dequantised
            said = str(layer.explain(mine.x, **call))
        assert ("products read the bytes of the rows as they came" in said) == (not dequantised)


@contextmanager
def bytes_that_travel() -> Iterator[list[int]]:
    """The bytes of each row or number that is sent, by exchange."""
    sizes: list[int] = []
    exchange = CollectiveTransport._exchange

    def counted(self: CollectiveTransport, arrived: Tensor, rows: Tensor, *others: object) -> object:
        sizes.append(rows[:1].numel() * rows.element_size() if rows.dim() > 1 else 0)
        return exchange(self, arrived, rows, *others)  # type: ignore[arg-type]

    with patch.object(CollectiveTransport, "_exchange", counted):
        yield sizes


@case
def tokens_of_8_bits_with_values_that_are_not_finite(world: World) -> None:
    """A block of a token is NaN, and its other values are as they were."""
    group = world.group(dtype=torch.bfloat16, hidden=272, capacity="exact")
    tokens = torch.randn(5, 272).bfloat16()
    tokens[2, 130], tokens[3] = float("inf"), 0
    ids = torch.full((5, 3), -1)
    ids[:, 0] = world.rank * 4
    dispatch = Sequential(ep.EPDispatch(group, recipe=Float8Block()))
    with bytes_that_travel() as moved:
        rows = dispatch[0].exchange(RoutedCall(tokens, ids, torch.ones(5, 3)), True).rows
    assert moved[0] == 288, "272 bytes and 3 scales, padded"
    want = QuantizedGroupedTensor.quantize(tokens, Float8Block(), torch.tensor([5])).dequantize()
    assert torch.equal(rows.isnan(), want.isnan())
    assert rows[2, 128:256].isnan().all()
    assert torch.equal(rows.nan_to_num(), want.nan_to_num())
    assert not rows[3].any()


@case
def ranks_that_send_tokens_of_other_bits(world: World) -> None:
    group = world.group(dtype=torch.bfloat16)
    mine = batch_for(group, counts_of(world)).of(world.rank)
    layer = part(group) if world.rank else part_of_8_bits(group)
    with raises(ep.PeerError, r"rank \d sends tokens of \d+ bits in dispatch .*the same recipe on all ranks"):
        with unchecked(group):
            layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        group.check()


@case
def recipes_by_which_no_tokens_travel(world: World) -> None:
    with raises(
        ValueError, r"EPDispatch: recipe must be Float8Block\(\) with powers of two .* got Float8Block\(scales="
    ):
        ep.EPDispatch(world.group(dtype=torch.bfloat16), recipe=Float8Block(scales="float32"))
    with raises(ValueError, "EPDispatch: recipe must be .* got MXFP8"):
        ep.EPDispatch(world.group(dtype=torch.bfloat16), recipe=MXFP8())
    with raises(ValueError, "EPDispatch: recipe needs a group of torch.bfloat16, which .* got torch.float32"):
        ep.EPDispatch(world.group(), recipe=Float8Block())


class Lending(CollectiveTransport):
    """Has memory for rows, as where our own kernels run."""

    def lends(self, table: CollectiveTable) -> bool:
        return True


@case
def rows_are_written_into_the_buffer_of_the_exchange(world: World) -> None:
    for capacity in (2.0, "exact"):
        for combine in ("exact", "reduced"):
            group = world.group(capacity=capacity, combine=combine)
            batches = [batch_for(group, counts_of(world), seed) for seed in (0, 1)]
            expected = [trained(part(group), batch.of(world.rank)) for batch in batches]
            group.mover = Lending(group.settings, group.process_group)
            for batch, of_unlent in zip(batches, expected, strict=True):
                layer, mine = part(group), batch.of(world.rank)
                trained(layer, mine)  # makes the buffer
                group.mover._buffers[0].fill_(torch.nan)
                layer.zero_grad()
                with allocations() as made:
                    same(trained(layer, mine), of_unlent)
                assert made == [], made


@contextmanager
def allocations() -> Iterator[list[object]]:
    """The products of the experts that are given no memory to write into, of the two whose rows travel."""
    made: list[object] = []
    original = kernels.grouped_gemm

    def watched(layout: object, *args: object, out: Tensor | None = None, **factors: object) -> object:
        if layout in (kernels.Layout.NT, kernels.Layout.NN) and out is None:
            made.append(layout)
        return original(layout, *args, out=out, **factors)

    kernels.grouped_gemm = watched
    try:
        yield made
    finally:
        kernels.grouped_gemm = original


@case
def autocast_casts_tokens_to_the_dtype_of_the_group(world: World) -> None:
    group = world.group(dtype=torch.bfloat16)
    batch = Batch.random(counts_of(world), group.settings.num_experts, 3)
    batch = batch._replace(dy=batch.dy.bfloat16())
    for fusions in (frozenset(), frozenset({"EPGroupedMLP"})):
        with config(disable_fusions=fusions), torch.autocast("cpu", torch.bfloat16):
            expected = trained(whole(group).float(), batch).of(batch.counts, group)
            came = trained(part(group).float(), batch.of(world.rank))
        assert came.y.dtype == torch.bfloat16
        assert came.dx.dtype == torch.float32
        torch.testing.assert_close(came.dx, expected.dx, rtol=2e-2, atol=2e-2)  # ours is rounded to that of the group
        same(came._replace(dx=expected.dx), expected)


@case
def gradients_accumulate_into_main_grad(world: World) -> None:
    group = world.group()
    batch = batch_for(group, counts_of(world))
    expected, layer = trained(whole(group), batch).of(batch.counts, group), part(group)
    for linear in (layer[1], layer[4]):
        linear.accumulate_into_main_grad = True
        linear.weight.main_grad = torch.ones_like(linear.weight)
    trained(layer, batch.of(world.rank))
    for i, linear in ((0, layer[1]), (2, layer[4])):
        torch.testing.assert_close(linear.weight.main_grad, 1 + expected.parameters[i])


@case
def strided_tokens_and_gradients(world: World) -> None:
    group = world.group()
    batch = batch_for(group, counts_of(world))
    wide = [torch.cat((t, t), 1).contiguous()[:, :H] for t in (batch.x, batch.dy)]
    mine = batch.of(world.rank)
    strided = [torch.cat((t, t), 1)[:, :H] for t in (mine.x, mine.dy)]
    x, weights, layer = strided[0].detach().requires_grad_(), mine.weights.requires_grad_(), part(group)
    y = layer(x, top_k_index=mine.ids, top_k_weights=weights)
    y.backward(strided[1])
    expected = trained(whole(group), batch._replace(x=wide[0], dy=wide[1])).of(batch.counts, group)
    same(Results(y.detach(), x.grad, weights.grad, tuple(p.grad for p in layer.parameters())), expected)


@case
def memory_that_held_nan_reaches_nothing(world: World) -> None:
    torch.use_deterministic_algorithms(True)  # torch then fills what it allocates with NaN
    try:
        for capacity in (2.0, "exact"):
            group = world.group(capacity=capacity)
            batch = batch_for(group, counts_of(world))
            mine = batch.of(world.rank)
            rows, sizes, scales, slots = ep.EPDispatch(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
            assert not rows[sizes.sum() :].any()
            assert not scales[sizes.sum() :].any()
            ep.EPCombine(group)(rows, row_of_slot=slots)
            check_step(group, batch)
            came = trained(part(world.group(capacity=capacity, combine="reduced")), mine)
            assert not any(t.isnan().any() for t in (*came[:3], *came.parameters))
    finally:
        torch.use_deterministic_algorithms(False)


@case
def sums_by_rank_are_those_that_reduced_promises(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        group = world.group(combine="reduced", dtype=dtype)
        batch = batch_for(group, counts_of(world))
        same(trained(part(group), batch.of(world.rank)), reduced(group, batch))


def reduced(group: ep.Group, batch: Batch) -> Results:
    """The results of this rank: rows of a token are summed and rounded on each rank, then over all ranks."""
    layer, owned, parts = whole(group), group.num_local_experts, []
    for rank in range(group.size):
        theirs = torch.where(batch.ids // owned == rank, batch.ids, group.settings.num_experts)
        parts.append(trained(layer, batch._replace(ids=theirs)))  # as in training: other code may infer
    tokens = torch.arange(len(batch.x)).unsqueeze(1) + len(batch.x) * torch.arange(group.size)
    y, dx = (routing._sum_of_slots(torch.cat([part[i] for part in parts]), tokens) for i in (0, 1))  # as combines there
    return trained(whole(group), batch)._replace(y=y, dx=dx).of(batch.counts, group)


@case
def any_problem_gives_the_bits_of_one_process(world: World) -> None:
    @settings(
        max_examples=10, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        counts=st.lists(st.integers(0, 9), min_size=world.size, max_size=world.size),
        owned=st.integers(1, 5),
        top_k=st.integers(1, 4),
        capacity=st.sampled_from(["exact", "worst", 3, 9, 0.5]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        index_dtype=st.sampled_from([torch.int32, torch.int64]),
        unfused=st.sampled_from([set(), {"EPGroupedMLP"}, {"EPGroupedMLP", "GroupedMLP", "RoutedMLP"}]),
        lane=st.integers(0, 1),
        overlap_dispatch=st.sampled_from([None, 0, 1, 2]),
        overlap_combine=st.sampled_from([None, False, True]),
        seed=st.integers(0, 99),
    )
    def check(
        counts: list[int], owned: int, top_k: int, capacity: object, dtype: torch.dtype, index_dtype: torch.dtype,
        unfused: set[str], lane: int, overlap_dispatch: int | None, overlap_combine: bool | None, seed: int,
    ) -> None:  # fmt: skip
        group = world.group(
            num_experts=owned * world.size, top_k=top_k, capacity=capacity, overflow="drop", lanes=2, dtype=dtype,
            overlap_dispatch=overlap_dispatch, overlap_combine=overlap_combine,
        )  # fmt: skip
        batch = batch_for(group, tuple(counts), seed)
        batch = batch._replace(ids=batch.ids.to(index_dtype))
        with config(disable_fusions=unfused):
            expected = trained(whole(group), without_overflow(group, batch)).of(batch.counts, group)
            same(trained(part(group, lane), batch.of(world.rank)), expected)

    check()


@case
def any_sequence_of_calls_gives_the_bits_of_one_process(world: World) -> None:
    """Two groups: regions are reused by calls that leave out one meeting or another."""
    groups = [world.group(lanes=2, overlap_combine=overlap) for overlap in (False, True)]
    group = groups[0]
    batches = [batch_for(group, counts_of(world), seed) for seed in (0, 1)]
    expected = [trained(whole(group), batch).of(batch.counts, group) for batch in batches]
    mine, layers = [batch.of(world.rank) for batch in batches], [part(of, lane) for of in groups for lane in (0, 1)]

    @settings(
        max_examples=4, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        st.lists(st.tuples(st.sampled_from(list(CALLS)), st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=6)
    )
    def check(calls: list[tuple[str, int, int]]) -> None:
        later = []
        for name, layer, seed in calls:
            backward = CALLS[name](layers[layer], mine[seed], expected[seed])
            if backward is not None:
                later.append(backward)
        for backward in reversed(later):
            backward()

    check()


def train(layer: Sequential, mine: Batch, expected: Results) -> None:
    layer.zero_grad()
    same(trained(layer, mine), expected)


def infer(layer: Sequential, mine: Batch, expected: Results) -> None:
    with torch.no_grad():
        assert torch.equal(layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights), expected.y)


def train_later(layer: Sequential, mine: Batch, expected: Results) -> Callable[[], None]:
    """The backward comes after other calls."""
    x, weights = mine.x.clone().requires_grad_(), mine.weights.clone().requires_grad_()
    y = layer(x, top_k_index=mine.ids, top_k_weights=weights)
    assert torch.equal(y, expected.y)

    def backward() -> None:
        dx, dweights, *gradients = torch.autograd.grad(y, [x, weights, *layer.parameters()], mine.dy)
        same(Results(y.detach(), dx, dweights, tuple(gradients)), expected)

    return backward


def train_experts(layer: Sequential, mine: Batch, expected: Results) -> None:
    """No gradient travels back."""
    y = layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    gradients = torch.autograd.grad(y, [*layer.parameters()], mine.dy)
    assert all(map(torch.equal, gradients, expected.parameters))


def train_inputs(layer: Sequential, mine: Batch, expected: Results) -> None:
    """Only the gradient of the routing weights is sent."""
    weights = mine.weights.clone().requires_grad_()
    y = layer(mine.x, top_k_index=mine.ids, top_k_weights=weights)
    (dweights,) = torch.autograd.grad(y, [weights], mine.dy)
    assert torch.equal(dweights, expected.dweights)


def train_dispatch(layer: Sequential, mine: Batch, expected: Results) -> None:
    """A backward of the dispatch without one of the combine."""
    x = mine.x.clone().requires_grad_()
    rows, _, _, slots = layer[0](x, top_k_index=mine.ids, top_k_weights=mine.weights)
    y = layer[5](rows.detach(), row_of_slot=slots)
    (dx,) = torch.autograd.grad(rows, [x], torch.ones_like(rows))
    count = (mine.ids < layer[0].group.settings.num_experts).sum(1, keepdim=True)
    torch.testing.assert_close(y, count * mine.x)
    assert torch.equal(dx, count * torch.ones_like(mine.x))


CALLS: dict[str, Callable[[Sequential, Batch, Results], Callable[[], None] | None]] = {
    each.__name__: each for each in (train, infer, train_later, train_experts, train_inputs, train_dispatch)
}


# --------------------------------------------------------------------------------------------------- capacity


def without_overflow(group: ep.Group, batch: Batch) -> Batch:
    """The batch, where slots whose rows have no room are of no expert: the last of an owner, by expert, then slot."""
    if group.local_capacity is None:
        return batch
    ids, experts_ = batch.ids.flatten().tolist(), group.settings.num_experts
    for owner in range(group.size):
        mine = range(owner * group.num_local_experts, (owner + 1) * group.num_local_experts)
        rows = sorted((expert, slot) for slot, expert in enumerate(ids) if expert in mine)
        for _, slot in rows[group.local_capacity :]:
            ids[slot] = experts_
    return batch._replace(ids=torch.tensor(ids, dtype=torch.int64).view_as(batch.ids))


@case
def capacity_that_is_hit_exactly_is_enough(world: World) -> None:
    required = largest(world)
    group = world.group(capacity=required)
    check_step(group, batch_for(group, counts_of(world)))
    assert group.statistics().required == required


@case
def a_row_too_many_raises_on_all_ranks_and_the_group_goes_on(world: World) -> None:
    required = largest(world)
    group = world.group(capacity=required - 1)
    batch = batch_for(group, counts_of(world))
    layer, mine = part(group), batch.of(world.rank)
    with raises(
        ep.CapacityError, rf"rank \d had to own {required} rows, its capacity is {required - 1}; .*capacity={required}"
    ):
        layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    group.check()
    none = batch._replace(ids=torch.full_like(batch.ids, group.settings.num_experts))
    check_step(group, none, layer)


@case
def a_factor_is_named_in_the_error(world: World) -> None:
    group = world.group(capacity=0.05)
    mine = batch_for(group, (13,) * world.size).of(world.rank)
    with raises(ep.CapacityError, r"its capacity is 2 \(0.05 x max_tokens x top_k\)"):
        part(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)


@case
def rows_too_many_are_dropped_alike_and_counted(world: World) -> None:
    required = largest(world)
    for capacity in (required - 1, 3, 1):
        group = world.group(capacity=capacity, overflow="drop")
        batch = batch_for(group, counts_of(world))
        kept = without_overflow(group, batch)
        dropped = int((kept.ids != batch.ids).sum())
        expected = trained(whole(group), kept).of(batch.counts, group)
        same(trained(part(group), batch.of(world.rank)), expected)
        assert dropped > 0
        assert group.statistics() == (1, required, dropped)


def largest(world: World) -> int:
    """The most rows that a rank has to own of the usual batch."""
    group = world.group()
    ids = batch_for(group, counts_of(world)).ids.flatten()
    owners = ids[ids < group.settings.num_experts] // group.num_local_experts
    return int(torch.bincount(owners).max())


# ------------------------------------------------------------------------------------------- groups, lanes, modes


@case
def two_groups_and_layers_one_after_the_other(world: World) -> None:
    groups = world.group(), world.group(num_experts=2 * world.size, top_k=2, capacity="exact")
    batches = [batch_for(group, counts_of(world)) for group in groups]
    whole_ones, parts = [whole(g) for g in groups], [part(g) for g in groups]

    def stacked(layers: list[Sequential], ids: list[Tensor], x: Tensor, weights: list[Tensor]) -> Tensor:
        for i in (0, 1, 0):
            x = x + layers[i](x, top_k_index=ids[i], top_k_weights=weights[i])
        return x

    results = []
    for layers, of in ((whole_ones, batches), (parts, [b.of(world.rank) for b in batches])):
        x = of[0].x.clone().requires_grad_()
        stacked(layers, [b.ids for b in of], x, [b.weights for b in of]).backward(of[0].dy)
        grads = tuple(p.grad for layer in layers for p in layer.parameters())
        results.append((x.grad, grads))
    own = slice(sum(batches[0].counts[: world.rank]), sum(batches[0].counts[: world.rank + 1]))
    assert torch.equal(results[1][0], results[0][0][own])
    for i, (came, expected) in enumerate(zip(results[1][1], results[0][1], strict=True)):
        assert torch.equal(came, expected[groups[i // 4].local_experts])
    assert groups[0].statistics().exchanges == 2


@case
def two_lanes_interleave(world: World) -> None:
    group = world.group(lanes=2)
    batches = [batch_for(group, counts_of(world), seed) for seed in (1, 2)]
    expected = [trained(whole(group), b).of(b.counts, group) for b in batches]
    layers = [part(group, lane) for lane in (0, 1)]
    mine = [b.of(world.rank) for b in batches]
    xs = [m.x.clone().requires_grad_() for m in mine]
    weights = [m.weights.clone().requires_grad_() for m in mine]
    sent = [
        layer[0](x, top_k_index=m.ids, top_k_weights=w)
        for layer, x, m, w in zip(layers, xs, mine, weights, strict=True)
    ]
    done = [
        layer[1:5](rows, op_kwargs={0: {"split_sizes": sizes}, 2: {"scales": scales}, 3: {"split_sizes": sizes}})
        for layer, (rows, sizes, scales, _) in zip(layers, sent, strict=True)
    ]
    ys = [layer[5](rows, row_of_slot=s[3]) for layer, rows, s in zip(layers, done, sent, strict=True)]
    for y, m in zip(ys, mine, strict=True):
        y.backward(m.dy)
    for i in (0, 1):
        grads = tuple(p.grad for p in layers[i].parameters())
        same(Results(ys[i].detach(), xs[i].grad, weights[i].grad, grads), expected[i])


@case
def a_group_of_some_ranks(world: World) -> None:
    some = dist.new_group([0, 1])
    if world.rank < 2:
        group = ep.Group(
            some, num_experts=4, max_tokens=7, top_k=2, hidden=H, dtype=torch.float32, capacity="worst", timeout=10
        )
        check_step(group, batch_for(group, (7, 0)))


@case
def nothing_is_kept_without_gradients(world: World) -> None:
    group = world.group()
    batch = batch_for(group, counts_of(world))
    expected, mine, layer = trained(whole(group), batch).of(batch.counts, group), batch.of(world.rank), part(group)
    with torch.no_grad():
        y = layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    with torch.inference_mode():
        z = layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    assert torch.equal(y, expected.y)
    assert torch.equal(z, expected.y)
    assert not y.requires_grad


@case
def checkpointing_runs_exchanges_again(world: World) -> None:
    group = world.group(capacity="exact")
    layer = part(group)
    for reentrant in (False, True):
        layer.zero_grad()

        def run(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, reentrant: bool = reentrant) -> Tensor:
            def body(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
                return layer(x, top_k_index=ids, top_k_weights=weights)

            y: Tensor = checkpoint(body, x, top_k_index, top_k_weights, use_reentrant=reentrant)
            return y

        check_step(group, batch_for(group, counts_of(world)), run)
    assert group.statistics().exchanges == 4


@case
def a_checkpoint_gives_gradients_of_the_routing_that_it_computes_again(world: World) -> None:
    """Where ranks change places, every size is the same; where all ids are others, only shapes are, and not always."""
    for capacity, combine in (("exact", "exact"), (2.0, "exact"), ("worst", "reduced")):
        check_checkpoints(world, world.group(capacity=capacity, combine=combine))


def check_checkpoints(world: World, group: ep.Group) -> None:
    """A recomputation that routes otherwise has the gradients of that routing, fused and op by op."""
    home = at_home(world, group)
    others = home._replace(ids=batch_for(group, (13,) * world.size, 1).of(world.rank).ids)
    routings = [moved_on(home, group)] + ([others] if group.local_capacity else [])
    for again, disabled in itertools.product(routings, ((), ("EPGroupedMLP", "GroupedMLP"))):
        with config(disable_fusions=frozenset(disabled)):
            came, expected = checkpointed(part(group), home, again), trained(part(group), again)
        same(came, expected._replace(y=came.y))


@case
def a_checkpoint_of_other_sizes_is_an_error_on_all_ranks(world: World) -> None:
    """With capacity ``"exact"``: the tokens of rank 0 go to rank 1, and the ranks past them notice by waiting."""
    apart = dist.new_group()  # one that fails closes its connections
    group = world.group(process_group=apart, capacity="exact", timeout=4.0)
    home = at_home(world, group)
    with raises((CheckpointError, ep.PeerError), "different metadata|did not take part"):
        checkpointed(part(group), home, moved_on(home, group) if world.rank == 0 else home)
    dist.barrier()


@case
def a_checkpoint_of_half_an_exchange_is_an_error(world: World) -> None:
    """A checkpoint of the dispatch alone opens an exchange that nothing ends; one of the combine finds none."""
    group = world.group()
    mine = at_home(world, group)
    x, ids = mine.x.requires_grad_(), {"top_k_index": mine.ids, "top_k_weights": mine.weights}
    dispatch, combine = ep.EPDispatch(group), ep.EPCombine(group)
    rows, _, _, slots = checkpoint(dispatch, x, **ids, use_reentrant=False)
    combine(rows, row_of_slot=slots).sum().backward()
    with raises(RuntimeError, "has had no EPCombine yet"):
        dispatch(x, **ids)
    group.reset()
    rows, _, _, slots = dispatch(x, **ids)
    y = checkpoint(combine, rows, row_of_slot=slots, use_reentrant=False)
    with raises(RuntimeError, "no EPDispatch is open"):
        y.sum().backward()


def at_home(world: World, group: ep.Group) -> Batch:
    """The tokens of this rank, 13 as on all others, whose experts are all its own."""
    mine: Batch = batch_for(group, (13,) * world.size).of(world.rank)
    return mine._replace(ids=mine.ids % group.num_local_experts + group.local_experts.start)


def moved_on(batch: Batch, group: ep.Group) -> Batch:
    """The same tokens, whose experts are those of the next rank."""
    return batch._replace(ids=(batch.ids + group.num_local_experts) % group.settings.num_experts)


def checkpointed(layer: Sequential, first: Batch, again: Batch) -> Results:
    """A step whose forward has the ids of one batch, and its recomputation those of another."""
    ids = iter((first.ids, again.ids))

    def body(x: Tensor, top_k_weights: Tensor) -> Tensor:
        y: Tensor = layer(x, top_k_index=next(ids), top_k_weights=top_k_weights)
        return y

    def run(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y: Tensor = checkpoint(body, x, top_k_weights, use_reentrant=False)
        return y

    return trained(run, first)._replace(parameters=tuple(p.grad for p in layer.parameters()))


@case
def a_retained_graph_runs_backward_twice(world: World) -> None:
    group = world.group()
    mine, layer = batch_for(group, counts_of(world)).of(world.rank), part(group)
    x = mine.x.clone().requires_grad_()
    y = layer(x, top_k_index=mine.ids, top_k_weights=mine.weights)
    y.backward(mine.dy, retain_graph=True)
    first = x.grad.clone()
    y.backward(mine.dy)
    assert torch.equal(x.grad, 2 * first)


@case
def frozen_parts_get_no_gradients_and_the_rest_keeps_its_bits(world: World) -> None:
    group = world.group()
    batch = batch_for(group, counts_of(world))
    expected, mine = trained(whole(group), batch).of(batch.counts, group), batch.of(world.rank)
    for trains_x, trains_weights, trains_experts in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0)):
        layer = part(group).requires_grad_(bool(trains_experts))
        x = mine.x.clone().requires_grad_(bool(trains_x))
        weights = mine.weights.clone().requires_grad_(bool(trains_weights))
        y = layer(x, top_k_index=mine.ids, top_k_weights=weights)
        if y.requires_grad:
            y.backward(mine.dy)
        assert torch.equal(y, expected.y)
        assert x.grad is None if not trains_x else torch.equal(x.grad, expected.dx)
        assert not trains_weights or torch.equal(weights.grad, expected.dweights)
        for p, grad in zip(layer.parameters(), expected.parameters, strict=True):
            assert p.grad is None if not trains_experts else torch.equal(p.grad, grad)


def follow(world: World, layer: Sequential, group: ep.Group) -> list[bool]:
    """For each sum of rows in a step, whether it is told that products follow."""
    told: list[bool] = []
    start_sum = group.mover.start_sum

    def noted(rows: Tensor | None, table: Any, kind: str, products_follow: bool = False) -> Callable[[], Tensor]:
        told.append(products_follow)
        return start_sum(rows, table, kind, products_follow)

    with patch.object(group.mover, "start_sum", noted):
        trained(layer, batch_for(group, counts_of(world)).of(world.rank))
    return told


def main_grads(linear: GroupedLinear) -> None:
    linear.accumulate_into_main_grad = True
    linear.weight.main_grad = torch.zeros_like(linear.weight)


@case
def a_sum_is_told_of_products_only_where_some_follow(world: World) -> None:
    """Else a part of the device would sum, and nothing run on the rest."""
    group = world.group(dtype=torch.bfloat16)
    layers: list[tuple[Sequential, bool]] = [(part(group), True)]
    for change, products in (
        (lambda linear: linear.requires_grad_(False), False),
        (lambda linear: setattr(linear, "delay_wgrad_compute", True), False),
        (lambda linear: setattr(linear, "recipe", Float8Block()), True),
        (main_grads, True),
    ):
        layer = part(group)
        for linear in (layer[1], layer[4]):
            change(linear)
        layers.append((layer, products))
    one_frozen = part(group)
    one_frozen[4].requires_grad_(False)
    for layer, products in (*layers, (one_frozen, True)):
        assert follow(world, layer, group) == [False, products]
    with config(disable_fusions=frozenset({"EPGroupedMLP"})):
        assert follow(world, part(group), group) == [False, False]


@case
def keywords_are_bound_as_those_of_any_op(world: World) -> None:
    group = world.group()
    batch = batch_for(group, counts_of(world))
    layer = part(group)
    by_op = {"top_k_index": 0, "top_k_weights": 0}

    def call(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        by_op.update(top_k_index=top_k_index, top_k_weights=top_k_weights)
        y: Tensor = layer(x, op_kwargs={layer[0]: by_op})
        return y

    check_step(group, batch, call)
    mine = batch.of(world.rank)
    assert isinstance(layer(mine.x, mine.ids, mine.weights), Tensor)  # extra outputs stay inside


@case
def compiled_code_runs_it_eagerly(world: World) -> None:
    group = world.group()
    layer = part(group)
    compiled = torch.compile(layer, backend="eager")
    check_step(group, batch_for(group, counts_of(world)), compiled_call(compiled))
    mine = batch_for(group, counts_of(world)).of(world.rank)
    torch.compiler.reset()
    whole_graph = torch.compile(layer, backend="eager", fullgraph=True)
    with raises(Exception, r"op 0 \(EPDispatch\): it waits for other ranks"), torch.no_grad():
        whole_graph(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)


def compiled_call(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, top_k_index, top_k_weights: compiled(x, top_k_index=top_k_index, top_k_weights=top_k_weights)


@case
def explain_says_what_moves_and_moves_nothing(world: World) -> None:
    for capacity in (2.0, "exact"):
        group = world.group(capacity=capacity)
        mine, layer = batch_for(group, counts_of(world)).of(world.rank), part(group)
        if world.rank:
            continue  # the others do not take part
        said = str(layer.explain(mine.x.requires_grad_(), top_k_index=mine.ids, top_k_weights=mine.weights))
        assert "all_to_all_single (dispatch)" in said
        assert "all_to_all_single (combine backward)" in said
        assert "transport collective" in said
        assert ("how many rows there are depends on data; " in said) == (capacity == "exact")
        assert group.statistics().exchanges == 0


@case
def a_copy_of_a_layer_has_the_same_group(world: World) -> None:
    group = world.group()
    layer = copy.deepcopy(part(group))
    assert layer[0].group is group
    check_step(group, batch_for(group, counts_of(world)), layer)
    with raises(TypeError, "cannot be pickled; save the state_dict"):
        pickle.dumps(layer)
    assert set(layer.state_dict()) == {"1.weight", "1.bias", "4.weight", "4.bias"}


@case
def a_small_model_trains_as_in_one_process(world: World) -> None:
    group = world.group(capacity="exact")
    models = [Model(whole(group)), Model(part(group))]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
    for step in range(5):
        batch = batch_for(group, counts_of(world), step)
        for model, optimizer, of in zip(models, optimizers, (batch, batch.of(world.rank)), strict=True):
            optimizer.zero_grad()
            model(of.x).backward(of.dy)
            for p in model.router.parameters():
                if model is models[1]:
                    dist.all_reduce(p.grad)
            optimizer.step()
    for a, b in zip(models[0].layer.parameters(), models[1].layer.parameters(), strict=True):
        torch.testing.assert_close(b, a[group.local_experts], rtol=1e-5, atol=1e-6)


class Model(nn.Module):
    """A router and its experts."""

    def __init__(self, layer: Sequential) -> None:
        super().__init__()
        torch.manual_seed(5)
        experts_ = 4 * dist.get_world_size()
        self.router, self.layer = nn.Linear(H, experts_, bias=False), layer

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(3)
        y: Tensor = self.layer(x, top_k_index=ids, top_k_weights=weights)
        return y


@case
def by_hand_as_by_ops(world: World) -> None:
    preset = PRESETS["small"]
    setting = expert_parallel.Setting(
        "small", world.size, 16, "fp32", "cpu", "skewed", "exact", "collective", 0, 1, False
    )
    batch = expert_parallel.draw(setting, world.rank)
    group = world.group(
        num_experts=preset.experts, max_tokens=16, top_k=preset.top_k, hidden=preset.features, capacity="exact"
    )
    rows, went = expert_parallel.dispatch_by_hand(batch, preset.experts, world.size)
    ours, _, _, slots = ep.EPDispatch(group)(batch.x, top_k_index=batch.ids, top_k_weights=batch.weights)
    sums = ep.EPCombine(group)(ours, row_of_slot=slots)
    assert torch.equal(rows, ours)
    torch.testing.assert_close(expert_parallel.combine_by_hand(rows, batch, went), sums)


def sent_by_rank(rows: Tensor, out: Tensor, sizes: Tensor, arrived: Tensor, group_name: str) -> None:
    """The documented behaviour of ``all_to_all_vdev_2d``, for two or more experts per rank."""
    counts = sizes.view(dist.get_world_size(), -1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    came = rows.new_empty(int(arriving.sum()), rows.shape[1])
    dist.all_to_all_single(came, rows, arriving.sum(1).tolist(), counts.sum(1).tolist())
    parts = came.split(arriving.flatten().tolist())
    by_expert = [parts[i] for i in torch.arange(arriving.numel()).view_as(arriving).mT.flatten()]
    out[: len(came)] = torch.cat(by_expert)
    arrived[0] = arriving.mT.flatten()
    arrived[1] = arrived[0].cumsum(0) - arrived[0]


def sent_back(rows: Tensor, out: Tensor, arrived: Tensor, back: Tensor, group_name: str) -> None:
    """The same of ``all_to_all_vdev_2d_offset``."""
    sizes = arrived[0].view(-1, dist.get_world_size()).mT.contiguous()
    starts = arrived[1].view_as(sizes.mT).mT.flatten()
    parts = [rows[start : start + size] for start, size in zip(starts, sizes.flatten(), strict=True)]
    returning = torch.empty_like(sizes)
    dist.all_to_all_single(returning, sizes)
    dist.all_to_all_single(out, torch.cat(parts), returning.sum(1).tolist(), sizes.sum(1).tolist())
    back[0] = returning.flatten()
    back[1] = back[0].cumsum(0) - back[0]


@case
def torchs_exchange_on_the_device_is_asked_for_what_goes_by_hand(world: World) -> None:
    setting = expert_parallel.Setting("small", world.size, 16, "fp32", "cpu", "skewed", "exact", "vdev_2d", 0, 1, False)
    batch, ops = expert_parallel.draw(setting, world.rank), torch.ops.symm_mem
    with (
        patch.object(vdev, "refusal", lambda device: None),
        patch.object(vdev, "_symmetric", torch.empty),
        patch.object(ops, "all_to_all_vdev_2d", sent_by_rank),
        patch.object(ops, "all_to_all_vdev_2d_offset", sent_back),
    ):
        results = expert_parallel.measure(setting)
        with (
            patch.object(ops, "all_to_all_vdev_2d_offset", lambda rows, out, *_: out.zero_()),
            raises(InaccurateError, "all_to_all_vdev_2d does not give what all_to_all_single gives"),
        ):
            expert_parallel.measure_vdev(setting, batch)
    assert results["differences"] == {"rows": 0.0, "sums": 0.0}
    assert list(results["seconds"]) == ["dispatch, vdev_2d", "combine, vdev_2d"]
    assert "differs from torch by hand by at most: rows 0.0e+00" in expert_parallel.table(setting, results)
    refused = expert_parallel.measure(setting)
    assert expert_parallel.table(setting, refused) == "not measured: all_to_all_vdev_2d needs GPUs, the device is cpu"


# ------------------------------------------------------------------------------------------------------ errors


@case
def settings_that_are_wrong(world: World) -> None:
    for wrong, words in (
        ({"num_experts": 2 * world.size + 1}, f"got {2 * world.size + 1} experts for {world.size} ranks"),
        ({"num_experts": 0}, "num_experts must be a positive int, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a positive int, got 1.5"),
        ({"top_k": True}, "top_k must be a positive int, got True"),
        ({"dtype": torch.int32}, "dtype must be a floating-point dtype of at least 16 bits, got torch.int32"),
        ({"float8_gradients": 1}, "float8_gradients must be True or False, got 1"),
        (
            {"float8_gradients": True},
            "float8_gradients needs torch.bfloat16, which holds the values exactly, got torch.float32",
        ),
        ({"capacity": "all"}, "capacity must be a factor .*, got 'all'"),
        ({"capacity": -1.0}, "capacity must be a factor .*, got -1.0"),
        ({"overflow": "ignore"}, "overflow must be one of 'raise', 'drop', got 'ignore'"),
        ({"combine": "fast"}, "combine must be one of 'exact', 'reduced', got 'fast'"),
        ({"transport": "copper"}, "transport must be one of 'auto', 'collective', 'symmetric', 'rails', got 'copper'"),
        ({"transport": "symmetric", "capacity": "exact"}, "capacity 'exact' needs transport 'collective'"),
        (
            {"transport": "symmetric", "combine": "reduced", "overlap_combine": True},
            "overlap_combine=True needs combine='exact': with 'reduced', rows are summed before they leave",
        ),
        ({"transport": "symmetric"}, "transport 'symmetric' cannot serve rank 0: it needs CUDA devices"),
        ({"lanes": 0}, "lanes must be a positive int"),
        ({"timeout": -1}, "timeout must be a number of seconds from 0.001 to 1e9, or 0 for none, got -1"),
        ({"timeout": float("inf")}, "timeout must be a number of seconds .*, or 0 for none, got inf"),
        ({"timeout": 1e-4}, "timeout must be a number of seconds from 0.001 .*, got 0.0001"),
        ({"overlap": False}, "overlap must be a number of multiprocessors, 0 for none, got False"),
        ({"overlap": -1}, "overlap must be a number of multiprocessors, 0 for none, got -1"),
        ({"overlap_dispatch": 1.5}, "overlap_dispatch must be a number of multiprocessors, 0 for none, got 1.5"),
        ({"overlap_combine": 1}, "overlap_combine must be True, False or None, got 1"),
    ):
        with raises(ValueError, words):
            world.group(**wrong)


@case
def ranks_that_do_not_reach_one_another(world: World) -> None:
    """Said by all ranks alike, before any memory is asked for."""
    served = patch.object(SymmetricTransport, "refusal", lambda settings, ranks: None)
    host = memory.Location.here(None).host
    numbers = {"device_count": lambda: 16, "can_device_access_peer": lambda a, b: False}
    for last, words in (
        (memory.Location("elsewhere", 0), r"is on host \S+, rank \d on elsewhere; it serves the GPUs of one host"),
        (memory.Location(host, 15), r"has cuda:0, which does not reach cuda:\d+ of rank \d"),
    ):
        mine = last if world.rank == world.size - 1 else memory.Location(host, world.rank)
        here = patch.object(memory.Location, "here", lambda on, mine=mine: mine)
        with served, here, patch.multiple(torch.cuda, **numbers), raises(ValueError, f"serve rank 0: it {words}"):
            world.group(transport="symmetric")
    group = world.group().process_group
    own = patch.object(memory, "symmetric_memory", return_value=torch.empty(8))
    refused = patch.object(memory, "symmetric_addresses", side_effect=RuntimeError("no peer access"))
    words = "gets no memory that all ranks can read: no peer access; use transport='collective'"
    with own, refused, raises(RuntimeError, words):
        memory.allocate(8, torch.device("cpu"), group)


@case
def a_rank_without_memory_is_told_to_all(world: World) -> None:
    """Ranks that have memory raise as well; none of them waits for the rank that has none."""
    process_group = world.group().process_group
    full = RuntimeError("CUDA out of memory") if world.rank == 1 else None
    own = patch.object(memory, "symmetric_memory", return_value=torch.empty(8), side_effect=full)
    words = r"gets no 3 MB of memory on rank 1: CUDA out of memory; make the group with a smaller capacity"
    with own, patch.object(memory, "symmetric_addresses") as met, raises(RuntimeError, words):
        memory.allocate(3 << 20, torch.device("cpu"), process_group)
    assert not met.call_count


@case
def graphs_are_not_captured_where_a_host_waits(world: World) -> None:
    group = world.group()
    mine = batch_for(group, counts_of(world)).of(world.rank)
    with patch.object(memory, "in_capture", lambda: True):
        with raises(RuntimeError, "dispatch of exchange 0 on lane 0: .* make the group with transport='symmetric'"):
            part(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        with raises(ValueError, "cannot serve rank 0: it captures a CUDA graph; make the group"):
            world.group(transport="symmetric")


@case
def settings_that_differ_between_ranks(world: World) -> None:
    with raises(ValueError, r"rank \d has max_tokens=\d, this rank has \d; give all ranks the same"):
        world.group(max_tokens=5 if world.rank else 6)
    with raises(ValueError, "top_k must be" if world.rank == 1 else "on rank 1, top_k must be a positive int, got 0"):
        world.group(top_k=0 if world.rank == 1 else 3)
    with raises(ValueError, r"rank \d has capacity=2(\.0)?, this rank has 2(\.0)?; give all ranks the same"):
        world.group(capacity=2 if world.rank else 2.0)  # rows, and a factor


@case
def a_process_that_is_no_rank_is_told(world: World) -> None:
    first, others = dist.new_group([0]), {"num_experts": 2, "max_tokens": 3, "top_k": 1, "hidden": H}
    if world.rank == 0:
        assert ep.Group(first, **others).size == 1
    else:
        with raises(ValueError, "Group: this process is no rank of the process group; make the group on its ranks"):
            ep.Group(first, **others)


@case
def arguments_that_do_not_fit(world: World) -> None:
    group = world.group()
    layer, x = part(group), torch.randn(5, H)
    ids, weights = torch.zeros(5, 3, dtype=torch.int64), torch.ones(5, 3)
    for (x_, ids_, weights_), words in (
        ((x, ids.float(), weights), r"op 0 \(EPDispatch\): top_k_index must be int32 or int64, got torch.float32"),
        ((x, ids[:4], weights), r"top_k_index must be \[T, k\], T=5 as x has tokens, got shape \[4, 3\]"),
        ((x, ids[:, :2], weights), r"top_k_index must be \[T, 3\], as the group has top_k=3, got \[5, 2\]"),
        ((x, ids, weights[:, :2]), r"top_k_weights must be \[T, 3\], as the group has top_k=3, got \[5, 2\]"),
        ((x, ids, ids), "top_k_weights must be floating-point, of at least 16 bits, got torch.int64"),
        ((x[:, :4], ids, weights), r"x must have 8 columns, as the group, got shape \[5, 4\]"),
        ((x[None], ids, weights), r"x must be tokens \[T, H\], got shape \[1, 5, 8\]"),
        (
            (x.to("meta"), ids.to("meta"), weights.to("meta")),
            "x must be on cpu or cuda, which the process group supports, got",
        ),
        ((x.double(), ids, weights), "x must be of torch.float32, as the group, got torch.float64; cast it"),
        (
            (torch.randn(14, H), ids[:1].expand(14, 3), weights[:1].expand(14, 3)),
            "x has 14 tokens, the group has max_t",
        ),
    ):
        with raises(ArgumentError, words):
            layer(x_, top_k_index=ids_, top_k_weights=weights_)
    other = experts(ep.EPDispatch(group), 3, ep.EPCombine(group))  # experts of a group with three a rank
    with raises(ArgumentError, r"op 1 \(GroupedLinear\): split_sizes: expected shape \[3\], .* got \[4\]"):
        other(x, top_k_index=ids, top_k_weights=weights)
    with raises(ArgumentError, "row_of_slot must be on cpu, as x, got meta"):
        ep.EPCombine(group)(torch.randn(group.local_capacity, H), row_of_slot=ids.to("meta"))
    with raises(ArgumentError, r"op 0 \(EPCombine\) needs 'row_of_slot'"):
        Sequential(ep.EPCombine(group))(x)
    assert group.statistics().exchanges == 0


@case
def ops_that_are_built_wrong(world: World) -> None:
    group = world.group(lanes=2)
    for op in (ep.EPDispatch, ep.EPCombine):
        with raises(TypeError, f"{op.__name__}: group must be a fusible.ep.Group, got a NoneType"):
            op(None)
        with raises(ValueError, f"{op.__name__}: lane must be one of the 2 lanes of the group, counted from 0, got 2"):
            op(group, 2)


@case
def exchanges_that_are_not_paired(world: World) -> None:
    group = world.group(lanes=2)
    mine = batch_for(group, counts_of(world)).of(world.rank)
    call = {"top_k_index": mine.ids, "top_k_weights": mine.weights}
    dispatch, combine, other = ep.EPDispatch(group), ep.EPCombine(group), ep.EPCombine(group, 1)
    rows, _, _, slots = dispatch(mine.x, **call)
    with raises(RuntimeError, "EPDispatch: exchange 0 on lane 0 has had no EPCombine yet; use another lane"):
        dispatch(mine.x, **call)
    assert group.row_buffer() is None or world.transport == "symmetric"
    with raises(RuntimeError, "Group: no EPDispatch is open on lane 1; call it first"):
        group.row_buffer(1)
    with raises(RuntimeError, "EPCombine: no EPDispatch is open on lane 1"):
        other(rows, row_of_slot=slots)
    with raises(RuntimeError, "EPCombine: row_of_slot is not from the EPDispatch that is open on lane 0"):
        combine(rows, row_of_slot=torch.zeros(3, 3, dtype=torch.int64))
    with raises(ArgumentError, rf"EPCombine: x must be the {group.local_capacity} rows of the EPDispatch before it"):
        combine(rows[:3], row_of_slot=slots)
    combine(rows, row_of_slot=slots)
    with raises(RuntimeError, "EPCombine: no EPDispatch is open on lane 0; each EPDispatch takes one EPCombine"):
        combine(rows, row_of_slot=slots)
    dispatch(mine.x, **call)
    group.reset()
    check_step(group, batch_for(group, counts_of(world)))


@case
def a_closed_group_says_so(world: World) -> None:
    group = world.group()
    mine, layer = batch_for(group, counts_of(world)).of(world.rank), part(group)
    group.close()
    group.close()
    with raises(RuntimeError, "the expert-parallel group is closed; make another one"):
        layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)


@case
def ranks_that_do_different_things(world: World) -> None:
    group = world.group(lanes=2)
    mine = batch_for(group, counts_of(world)).of(world.rank)
    layer = part(group, lane=min(world.rank, 1))
    with raises(ep.PeerError, r"rank \d is at dispatch of exchange 0 on lane \d, this rank at .*the same layers"):
        layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    with raises(ep.PeerError, r"rank \d is at dispatch of exchange 0 on lane \d"):
        group.check()
    check_step(world.group(), batch_for(group, counts_of(world)))  # other groups live on


@case
def ranks_that_use_different_groups(world: World) -> None:
    """The groups have one process group and equal settings, so messages of one would fit the other."""
    groups = world.group(timeout=2), world.group(timeout=2)
    mine = batch_for(groups[0], counts_of(world)).of(world.rank)
    mixed = groups[min(world.rank, 1)]
    with raises(ep.PeerError, r"rank \d (is at dispatch of exchange 0 .* of another Group, this|did not take part)"):
        with unchecked(mixed):
            part(mixed)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
        mixed.check(synchronize=True)
    check_step(world.group(), batch_for(mixed, counts_of(world)))


@case
def ranks_whose_weights_are_of_other_bits(world: World) -> None:
    group = world.group()
    mine = batch_for(group, counts_of(world)).of(world.rank)
    weights = mine.weights.double() if world.rank == 0 else mine.weights.bfloat16()
    words = r"rank \d has routing weights of (64|32) bits in dispatch of .* this rank of (32|64); give .* one dtype"
    with raises(ep.PeerError, words):
        with unchecked(group):
            part(group)(mine.x, top_k_index=mine.ids, top_k_weights=weights)
        group.check(synchronize=True)


@case
def ranks_that_want_different_gradients(world: World) -> None:
    group = world.group()
    mine = batch_for(group, counts_of(world)).of(world.rank)
    x = mine.x.requires_grad_(world.rank == 0)
    with raises(ep.PeerError, r"rank \d wants gradients of \w+ in dispatch of exchange 0 .*set requires_grad alike"):
        part(group)(x, top_k_index=mine.ids, top_k_weights=mine.weights)


@case
def a_group_is_freed_with_its_last_reference(world: World) -> None:
    """Its memory is freed at once, even if the group has failed: the error keeps no frames."""
    gc.disable()
    try:
        for fails in (False, True):
            group = world.group()
            mine = batch_for(group, counts_of(world)).of(world.rank)
            layer, left = part(group), [weakref.ref(group), weakref.ref(group.mover)]
            x = mine.x.requires_grad_(fails and world.rank == 0)
            with pytest.raises(ep.PeerError) if fails else nullcontext():
                layer(x, top_k_index=mine.ids, top_k_weights=mine.weights)
                group.check(synchronize=True)
            dist.barrier()
            del layer, group
            assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


@case
def a_group_needs_processes_that_know_each_other(world: World) -> None:
    assert repr(world.group()) == f"Group(rank {world.rank} of {world.size}, {4 * world.size} experts, collective)"
