"""Expert parallelism over the collectives of torch, on processes of this machine: the bits of one, errors, no hangs."""

from __future__ import annotations

from pathlib import Path

import ep_cases
import ep_failures
import ep_world
import pytest
import torch

from fusible import ep


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the ranks say of every case."""
    return ep_world.start("ep_cases", request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [case.__name__ for case in ep_cases.CASES])
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ranks = said.get(case, [])

    assert ranks, said.get("started", ["no rank came to it"])
    assert not any(ranks), "\n".join(ranks)


@pytest.fixture(scope="module")
def said_of_failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return ep_world.start("ep_failures", 3, tmp_path_factory.mktemp("failing"))


@pytest.mark.parametrize("case", [case.__name__ for case in ep_failures.CASES])
def test_a_rank_that_does_not_come(case: str, said_of_failures: dict[str, list[str]]) -> None:
    ranks = said_of_failures.get(case, [])

    assert len(ranks) == (2 if "ends" in case else 3), said_of_failures
    assert not any(ranks), "\n".join(ranks)


def test_a_group_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"Group: call torch.distributed.init_process_group\(\) first"):
        ep.Group(num_experts=2, max_tokens=1, top_k=1, hidden=8, dtype=torch.float32)


def test_a_fault_in_a_case_is_seen(tmp_path: Path) -> None:
    """The tests above would say so."""
    said = ep_world.start("ep_faulty", 2, tmp_path)

    assert said["a_case_that_fails_on_one_rank"][0] == ""
    assert "AssertionError: y differs" in said["a_case_that_fails_on_one_rank"][1]
