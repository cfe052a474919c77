"""torchtitan's own routed experts on two processes: our token dispatcher gives what its all-to-all one gives."""

from __future__ import annotations

import warnings

import ep_world
import pytest
import torch
from absent import triton_if_missing

try:
    with triton_if_missing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ep_torchtitan_cases
except ImportError as error:
    pytest.skip(f"torchtitan cannot be imported: {error}", allow_module_level=True)


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of the ranks on the cases."""
    return ep_world.start("ep_torchtitan_cases", 2, tmp_path_factory.mktemp("ranks"), only=ep_world.selected(request))


@pytest.mark.parametrize("case", [case.__name__ for case in ep_torchtitan_cases.CASES])
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


@pytest.fixture(scope="module")
def said_of_graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of the ranks, on GPUs."""
    ranks, folder = min(torch.cuda.device_count(), 2), tmp_path_factory.mktemp("graphs")
    return ep_world.start("ep_torchtitan_graph_cases", ranks, folder, transport="symmetric", device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["steps_are_captured"])
def test_in_cuda_graphs(case: str, said_of_graphs: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said_of_graphs)
