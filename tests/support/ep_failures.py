"""Ranks that do not come: what the others say, and what still works; see ``ep_world``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from ep_cases import batch_for, raises
from ep_world import TIMEOUT, H, World, check_step, part, same, trained, whole
from torch import distributed as dist

from fusible import ep

COUNTS = (7, 4, 2)


def group_of(
    process_group: dist.ProcessGroup | None, timeout: float, size: int, transport: str = "collective"
) -> ep.Group:
    return ep.Group(
        process_group, num_experts=2 * size, max_tokens=13, top_k=3, hidden=H, dtype=torch.float32, capacity="worst",
        timeout=timeout, transport=transport,
    )  # fmt: skip


def a_case_that_fails_on_one_rank(world: World) -> None:
    group = world.group()
    batch = batch_for(group, COUNTS)
    expected = trained(whole(group), batch).of(batch.counts, group)
    came = trained(part(group), batch.of(world.rank))
    same(came._replace(y=came.y + (world.rank == 1)), expected)


def a_rank_that_sleeps_is_an_error_after_the_timeout(world: World) -> None:
    two = dist.new_group([0, 1])
    if world.rank < 2:
        group = group_of(two, 1.0, 2)
        mine, layer = batch_for(group, COUNTS[:2]).of(world.rank), part(group)
        began = time.monotonic()
        if world.rank == 1:
            time.sleep(8)
        else:
            with raises(ep.PeerError, "a rank did not take part in dispatch of exchange 0 on lane 0: "):
                layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
            assert 0.9 < time.monotonic() - began < 7
            with raises(ep.PeerError, "a rank did not take part in dispatch of exchange 0 on lane 0: "):
                group.check()
    dist.barrier()
    another_group_works(world, failed=group if world.rank < 2 else None)


def another_group_works(world: World, failed: ep.Group | None) -> None:
    """In processes whose last one has failed; closing that one waits for no rank."""
    began = time.monotonic()
    if failed is not None and world.rank == 0:
        failed.close()
    assert time.monotonic() - began < 0.5
    again = dist.new_group([0, 1])
    if world.rank < 2:
        group = group_of(again, TIMEOUT, 2)
        check_step(group, batch_for(group, COUNTS[:2]))
        group.close()


def a_rank_that_ends_in_the_middle_is_an_error_for_the_others(world: World) -> None:
    """At once where a connection breaks; after the timeout, by name, where ranks look at one another's memory."""
    told = world.transport == "collective"
    group = group_of(None, 60.0 if told else 10.0, 3, world.transport)
    others = dist.new_group([0, 1])
    mine, layer = batch_for(group, COUNTS).of(world.rank), part(group)
    rows, _, _, slots = layer[0](mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    dist.barrier()
    if world.rank == 2:
        os._exit(1)
    began = time.monotonic()
    who = "a rank did not take part in combine of exchange 0 on lane 0: "
    with raises(ep.PeerError, who if told else who.replace("a rank", "rank 2").replace(": ", " within 10.0 s; of 3 ")):
        layer[5](rows, row_of_slot=slots)
        group.check()
    assert time.monotonic() - began < 30
    with raises(ep.PeerError, "combine of exchange 0"):
        layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    left = group_of(others, 60.0, 2, world.transport)  # those that are left make another group, and go on
    check_step(left, batch_for(left, COUNTS[:2]))


CASES: list[Callable[[World], None]] = [
    a_case_that_fails_on_one_rank,
    a_rank_that_sleeps_is_an_error_after_the_timeout,
    a_rank_that_ends_in_the_middle_is_an_error_for_the_others,
]
