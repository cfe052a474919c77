"""Expert parallelism over the links of GPUs: the bits of one, thousands of exchanges, graphs, errors, no hangs."""

from __future__ import annotations

import ep_gpu_cases
import ep_world
import pytest
import torch

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, here are {GPUS}")]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the ranks say of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    return ep_world.start("ep_gpu_cases", min(GPUS, 4), folder, transport="symmetric", device="cuda")


@pytest.mark.parametrize("case", [case.__name__ for case in ep_gpu_cases.CASES])
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)
