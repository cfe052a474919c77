"""Expert parallelism over the links of GPUs: the bits of one, thousands of exchanges, graphs, errors, no hangs.

A rank that is alone is its own peer: its kernels, overlaps and graphs are the same, and one GPU is enough.
All ends within five minutes: four ranks have :data:`TOGETHER` seconds for all cases, a rank alone :data:`ALONE_FOR`,
and whatever runs then is killed with its children. ``ep_proof`` has the long runs.
"""

from __future__ import annotations

import ep_gpu_cases
import ep_world
import pytest
import torch

GPUS = torch.cuda.device_count()
TOGETHER, ALONE_FOR = 190, 80  # seconds; one that hangs in a driver is waited for five more
ALONE = [
    case.__name__
    for case in (
        ep_gpu_cases.steps_give_the_bits_of_one_gpu,
        ep_gpu_cases.layers_of_models_give_the_bits_of_one_gpu,
        ep_gpu_cases.a_step_asks_nothing_of_the_host,
        ep_gpu_cases.graphs_are_replayed_with_other_ids,
    )
]
pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of the ranks on the cases."""
    folder, only = tmp_path_factory.mktemp("ranks"), ep_world.selected(request)
    return ep_world.start("ep_gpu_cases", min(GPUS, 4), folder, TOGETHER, "symmetric", "cuda", only)


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, here are {GPUS}")
@pytest.mark.parametrize("case", [case.__name__ for case in ep_gpu_cases.CASES])
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


@pytest.fixture(scope="module")
def said_alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of a single rank."""
    folder, only = tmp_path_factory.mktemp("alone"), ep_world.selected(request)
    return ep_world.start("ep_gpu_cases", 1, folder, ALONE_FOR, "symmetric", "cuda", only)


@pytest.mark.parametrize("case", ALONE)
def test_a_rank_alone(case: str, said_alone: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said_alone)
