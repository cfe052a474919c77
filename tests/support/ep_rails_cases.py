"""Cases of the transport ``rails``: ranks of two hosts, whose kernels run on the CPU; see ``ep_shared_memory``.

The hosts are those that the ranks are on, or, if all are on one, two halves of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ep_cases import batch_for, counts_of, part_of_8_bits, raises, wide_batch
from ep_cases import rounded as rounded_tokens
from ep_sharded_cases import page
from ep_world import TIMEOUT, Batch, H, Results, World, part, same, trained, whole
from torch import Tensor
from torch import distributed as dist

from fusible import config, ep
from fusible.ops.ep import memory
from fusible.ops.ep.rails import Rail, RailsTransport
from fusible.ops.routed.call import RoutedCall

CASES: list[Callable[[World], None]] = []
HOSTS = 2


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


@contextmanager
def on_hosts(world: World, host: Callable[[int], str] | None = None) -> Iterator[None]:
    """A context in which the ranks are on hosts of these names: on two by default, if they are on one."""
    location, names = memory.Location.here(None), [""] * world.size
    dist.all_gather_object(names, location.host)
    if host is None and len({*names}) == HOSTS:
        yield
        return
    named = host or (lambda rank: f"half{HOSTS * rank // world.size}")
    with patch.object(memory.Location, "here", lambda on: memory.Location(named(world.rank), -1)):
        yield


def rails(world: World, **settings: Any) -> ep.Group:
    with on_hosts(world):
        return world.group(**{"transport": "rails", "combine": "reduced", **settings})


@case
def the_page_shows_a_group(world: World) -> None:
    with on_hosts(world):
        group = page("hosts")["rails_group"](num_experts=8, max_tokens=13, top_k=3, hidden=H, dtype=torch.float32)
    assert (group.transport, group.settings.combine) == ("rails", "reduced")
    check(group, batch_for(group, counts_of(world)))


def rounded(parts: list[Tensor]) -> Tensor:
    """The sum of what hosts have rounded, in their order, in float32, rounded once more."""
    total: Tensor = reduce(torch.add, (p.to(torch.promote_types(p.dtype, torch.float32)) for p in parts))
    return total.to(parts[0].dtype)


def expected_of(group: ep.Group, batch: Batch) -> Results:
    """One process that computes each host's sums for the tokens of all, and adds them.

    The rows of an expert are in the order of rails, then hosts: ranks 0 and 2 of four, then 1 and 3.
    """
    size, experts = group.size, group.settings.num_experts
    order = [host * size // HOSTS + i for i in range(size // HOSTS) for host in range(HOSTS)]
    by_rail = Batch(
        tuple(batch.counts[rank] for rank in order),
        *(torch.cat(tensors) for tensors in zip(*(batch.of(rank)[1:] for rank in order), strict=True)),
    )
    of_hosts = []
    for host in range(HOSTS):
        here = by_rail.ids.div(experts // HOSTS, rounding_mode="floor") == host
        of_hosts.append(trained(whole(group), by_rail._replace(ids=torch.where(here, by_rail.ids, -1))))
    y, dx, dweights = (rounded([each[i] for each in of_hosts]) for i in range(3))
    parameters = tuple(rounded([*grads]) for grads in zip(*(each.parameters for each in of_hosts), strict=True))
    position = order.index(group.rank)
    own = slice(sum(by_rail.counts[:position]), sum(by_rail.counts[: position + 1]))
    return Results(y[own], dx[own], dweights[own], tuple(grad[group.local_experts] for grad in parameters))


def check(group: ep.Group, batch: Batch) -> None:
    same(trained(part(group), batch.of(group.rank)), expected_of(group, batch))
    group.check(synchronize=True)


@case
def a_step_has_the_bits_of_hosts_that_round_their_sums(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        group = rails(world, dtype=dtype)
        for seed, counts in enumerate((counts_of(world), (0,) * world.size)):
            check(group, batch_for(group, counts, seed))
    with config(disable_fusions=frozenset({"EPGroupedMLP"})):
        check(group, batch_for(group, counts_of(world), 3))


@case
def tokens_of_8_bits_cross_between_hosts(world: World) -> None:
    group, sent = rails(world, dtype=torch.bfloat16, hidden=272), []
    gathered = Rail.gathered

    def noted(self: Rail, x: Tensor, named: str) -> Tensor:
        sent.append(tuple(x.shape))
        return gathered(self, x, named)

    batch = wide_batch(group, counts_of(world))
    with patch.object(Rail, "gathered", noted):
        came = trained(part_of_8_bits(group), batch.of(world.rank))
    same(came, expected_of(group, rounded_tokens(batch)))
    assert sent[3] == (group.settings.max_tokens, 288 // 2)


@case
def gradients_of_8_bits_cross_between_hosts(world: World) -> None:
    group = rails(world, dtype=torch.bfloat16, hidden=272, float8_gradients=True)
    batch = wide_batch(group, counts_of(world))
    gradients = rounded_tokens(batch._replace(x=batch.dy)).x
    same(trained(part(group), batch.of(world.rank)), expected_of(group, batch._replace(dy=gradients)))


@case
def rows_are_sent_to_slots_where_it_is_asked_for(world: World) -> None:
    group = rails(world, overlap_dispatch=2, overlap_combine=True, dtype=torch.bfloat16)
    check(group, batch_for(group, counts_of(world)))


@case
def one_expert_takes_all(world: World) -> None:
    group = rails(world)
    batch = batch_for(group, counts_of(world))
    check(group, batch._replace(ids=torch.full_like(batch.ids, group.settings.num_experts - 1)))


@case
def ids_of_no_expert_add_nothing(world: World) -> None:
    group = rails(world)
    mine = batch_for(group, counts_of(world)).of(world.rank)
    for nothing in (-1, -7, group.settings.num_experts, 1 << 20):
        came = trained(part(group), mine._replace(ids=torch.full_like(mine.ids, nothing)))
        assert not came.y.any()
        assert not came.dx.any()
        assert not came.dweights.any()


@case
def a_token_crosses_once_a_host(world: World) -> None:
    """The bytes of tokens that this rank gathers are those of the ranks of its rail, however many slots they have."""
    group, sent = rails(world), []
    gathered = Rail.gathered

    def noted(self: Rail, x: Tensor, named: str) -> Tensor:
        sent.append(tuple(x.shape))
        return gathered(self, x, named)

    mine = batch_for(group, counts_of(world)).of(world.rank)
    with patch.object(Rail, "gathered", noted):
        part(group)(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    s = group.settings
    assert sent == [(2,), (s.max_tokens, s.top_k), (s.max_tokens, s.top_k), (s.max_tokens, s.hidden)]


@case
def a_rank_owns_no_more_rows_than_by_another_transport(world: World) -> None:
    group, other = rails(world, capacity=2.0), world.group(transport="collective", capacity=2.0)
    assert group.local_capacity == other.local_capacity
    x, ids, weights = tensors_of(group, world)
    rows, *_ = ep.EPDispatch(group)(x, top_k_index=ids, top_k_weights=weights)
    assert rows.shape[0] == group.local_capacity


def tensors_of(group: ep.Group, world: World) -> tuple[Tensor, Tensor, Tensor]:
    mine = batch_for(group, counts_of(world)).of(world.rank)
    return mine.x, mine.ids, mine.weights


@case
def planted_faults_are_seen(world: World) -> None:
    group = rails(world, dtype=torch.bfloat16)
    batch, of_host, padded = batch_for(group, (13,) * world.size), RailsTransport._of_this_host, RailsTransport._padded
    faults: dict[str, Any] = {
        "_of_this_host": lambda self, ids: of_host(self, ids).roll(1, 0),  # experts of another token
        "_padded": lambda self, x, value=0.0: padded(self, x.roll(1, 0), value),
        "_returned": lambda self, sums, table, kind: sums[: table.row_of_slot.shape[0]],  # of this host alone
    }
    for name, fault in faults.items():
        with patch.object(RailsTransport, name, fault), pytest.raises(AssertionError, match="differs by"):
            check(group, batch)
    check(group, batch)


# ------------------------------------------------------------------------------------------------------- errors


@case
def hosts_that_rails_cannot_connect(world: World) -> None:
    settings = {"transport": "rails", "combine": "reduced"}
    with on_hosts(world, lambda rank: "one"), raises(ValueError, "is on host one, as all ranks are; make .*symmetric"):
        world.group(**settings)
    if world.size == 4:
        for host in (lambda rank: f"host{rank % 2}", lambda rank: f"host{int(rank > 0)}"):
            with on_hosts(world, host), raises(ValueError, "needs equally many ranks on each host, in consecutive"):
                world.group(**settings)
    with raises(ValueError, "combine 'exact' is not possible with transport 'rails', where each host rounds its sums"):
        world.group(transport="rails")
    with raises(ValueError, "capacity 'exact' needs transport 'collective', .* give 'rails' a number"):
        world._replace(transport="collective").group(**settings, capacity="exact")


@case
def hosts_that_want_other_gradients(world: World) -> None:
    group = rails(world)
    x, ids, weights = tensors_of(group, world)
    layer, first = part(group), world.rank < world.size // HOSTS
    with torch.no_grad(), raises(ep.PeerError, r"rank \d wants gradients of \w+ in dispatch of exchange 0 on lane 0"):
        layer[0].exchange(RoutedCall(x, ids, weights, frozenset({"x"} if first else ())), fill=True)
        group.check(synchronize=True)
    with raises(ep.PeerError, "set requires_grad alike on all ranks"):
        layer(x, top_k_index=ids, top_k_weights=weights)


@case
def hosts_that_send_in_another_form(world: World) -> None:
    """Messages of the two forms differ in size, so hosts send none."""
    first = world.rank < world.size // HOSTS
    for known in (False, True):
        for of_tokens, words in ((True, "sends tokens of .* the same recipe"), (False, "has routing weights of .*one")):
            group = rails(world, dtype=torch.bfloat16, hidden=272)
            batch = wide_batch(group, counts_of(world)).of(world.rank)
            plain = part(group), batch.weights
            other = (part_of_8_bits(group), batch.weights) if of_tokens else (part(group), batch.weights.double())
            with torch.no_grad():
                for layer, weights in (plain, other) if known else ():
                    layer(batch.x, top_k_index=batch.ids, top_k_weights=weights)
                layer, weights = other if first else plain
                with raises(ep.PeerError, rf"rank \d {words}"):
                    layer(batch.x, top_k_index=batch.ids, top_k_weights=weights)


@case
def a_group_made_in_inference_mode_trains(world: World) -> None:
    with torch.inference_mode():
        group = rails(world)
    check(group, batch_for(group, counts_of(world)))


@case
def a_host_without_room_says_so_and_the_other_that_it_did_not_come(world: World) -> None:
    group = rails(world, capacity=3, timeout=8.0)
    batch = batch_for(group, (13,) * world.size).of(world.rank)
    layer, call = part(group), {"top_k_index": torch.zeros_like(batch.ids), "top_k_weights": batch.weights}
    words = r"host 0, its ranks from 0 to \d: .* rank 0 had to own \d+ rows, its capacity is 3; .*: make another group"
    kind, said = (ep.CapacityError, words) if world.rank < world.size // HOSTS else (ep.PeerError, "did not take part")

    def run() -> None:
        layer(batch.x, **call)
        group.check(synchronize=True)

    with raises(kind, said):
        run()
    for again in (group.reset, group.check):
        with raises(kind, said):
            again()
    group.close()
    dist.barrier()


@case
def rows_that_do_not_fit_are_dropped_where_it_is_asked_for(world: World) -> None:
    group = rails(world, capacity=3, overflow="drop")
    batch = batch_for(group, (13,) * world.size).of(world.rank)
    came = trained(part(group), batch._replace(ids=torch.zeros_like(batch.ids)))
    assert came.y.isfinite().all()
    assert (group.statistics().dropped > 0) == (world.rank < world.size // HOSTS)


@case
def a_rank_that_sleeps_is_an_error(world: World) -> None:
    patience = 4.0
    group = rails(world, timeout=patience)
    x, ids, weights = tensors_of(group, world)
    layer = part(group)
    layer(x, top_k_index=ids, top_k_weights=weights)
    dist.barrier()
    if world.rank == 0:
        time.sleep(3 * patience)
    began = time.monotonic()
    with raises(ep.PeerError, r"did not take part in \w+ of exchange 1 on lane 0"):
        layer(x, top_k_index=ids, top_k_weights=weights)
        group.check(synchronize=True)
    assert time.monotonic() - began < TIMEOUT
    dist.barrier()
