"""A case that does not hold on one rank; see ``ep_world``."""

from __future__ import annotations

from collections.abc import Callable

from ep_cases import batch_for
from ep_world import World, part, same, trained, whole


def a_case_that_fails_on_one_rank(world: World) -> None:
    group = world.group()
    batch = batch_for(group, (5, 4))
    expected = trained(whole(group), batch).of(batch.counts, group)
    came = trained(part(group), batch.of(world.rank))
    same(came._replace(y=came.y + world.rank), expected)


CASES: list[Callable[[World], None]] = [a_case_that_fails_on_one_rank]
