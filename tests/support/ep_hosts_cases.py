"""Cases of expert parallelism on ranks of two hosts; see ``two_hosts``. The last one cuts the wire."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from unittest.mock import patch

import ep_cases
import pytest
import two_hosts
from ep_cases import batch_for, raises
from ep_world import World, check_step, part

from fusible import ep
from fusible.ops.ep.symmetric import SymmetricTransport

CUT_AFTER = 4.0  # seconds of patience


def the_ranks_are_on_two_hosts(world: World) -> None:
    assert socket.gethostname() == two_hosts.NAMES[2 * world.rank // world.size]


def the_transport_of_one_host_names_both(world: World) -> None:
    """Before it asks for memory."""
    served = patch.object(SymmetricTransport, "refusal", lambda settings, ranks: None)
    with served, raises(ValueError, "serve rank 0: it is on host fusible-host0, rank . on fusible-host1; it serves"):
        world.group(transport="symmetric")


def a_wire_that_is_cut_is_an_error_on_both(world: World) -> None:
    group = world.group(timeout=CUT_AFTER, capacity="exact")
    batch = batch_for(group, (7,) * world.size)
    layer, mine = part(group), batch.of(world.rank)
    check_step(group, batch, layer)
    if world.rank == world.size - 1:
        two_hosts.cut()
    began = time.monotonic()
    with pytest.raises(ep.PeerError, match="a rank did not take part in dispatch of exchange 1 on lane 0"):
        layer(mine.x, top_k_index=mine.ids, top_k_weights=mine.weights)
    assert time.monotonic() - began < 10 * CUT_AFTER


CASES: list[Callable[[World], None]] = [
    the_ranks_are_on_two_hosts,
    the_transport_of_one_host_names_both,
    ep_cases.a_step_gives_the_bits_of_one_process,
    ep_cases.no_rank_has_tokens,
    ep_cases.one_expert_takes_all,
    a_wire_that_is_cut_is_an_error_on_both,
]
