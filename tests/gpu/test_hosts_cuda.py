"""Expert parallelism between hosts for which NCCL takes halves of four GPUs: sockets between them, no links.

It shows that results are right over NCCL's paths between hosts, and that nothing hangs; it says nothing of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import ep_gpu_cases
import ep_rails_cases
import ep_world
import pytest
import torch

RANKS, GPUS = 4, torch.cuda.device_count()
SOCKETS = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
RUNS = {  # by transport: the module of the cases, what World.group takes where a case does not say, the cases
    "collective": (
        *("ep_gpu_cases", "collective"),
        (
            ep_gpu_cases.steps_give_the_bits_of_one_gpu,
            ep_gpu_cases.sums_by_rank_are_near_those_of_one_gpu_and_repeat,
            ep_gpu_cases.checkpoints_give_gradients_of_the_routing_that_they_compute_again,
        ),
    ),
    "rails": (
        *("ep_rails_cases", "symmetric"),
        (
            ep_rails_cases.a_step_has_the_bits_of_hosts_that_round_their_sums,
            ep_rails_cases.rows_are_sent_to_slots_where_it_is_asked_for,
            ep_rails_cases.one_expert_takes_all,
            ep_rails_cases.ids_of_no_expert_add_nothing,
        ),
    ),
}
EACH = [(transport, case.__name__) for transport, (*_, cases) in RUNS.items() for case in cases]
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(GPUS < RANKS, reason=f"needs four GPUs, here are {GPUS}")]


def on_its_host(rank: int) -> list[str]:
    """The words in front of the command of a rank: NCCL believes what they say of its host."""
    host = {"NCCL_HOSTID": f"host{2 * rank // RANKS}", **SOCKETS}
    return ["env", *[f"{name}={value}" for name, value in host.items()]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[str]]]:
    """A function that starts the ranks of a transport, once, and returns their messages on its cases."""

    @cache
    def started(transport: str) -> dict[str, list[str]]:
        module, of_world, cases = RUNS[transport]
        only, folder = [case.__name__ for case in cases], tmp_path_factory.mktemp(transport)
        return ep_world.start(module, RANKS, folder, 120, of_world, "cuda", only, on_its_host)

    return started


@pytest.mark.parametrize(("transport", "case"), EACH)
def test_on_two_hosts(transport: str, case: str, said: Callable[[str], dict[str, list[str]]]) -> None:
    ep_world.assert_passed(case, said(transport))
