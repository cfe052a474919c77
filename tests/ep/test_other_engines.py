"""The recipes for other engines: DeepEP 2 and TransformerEngine's NCCL EP bring the rows, by stand-ins."""

from __future__ import annotations

import ep_engines_cases
import ep_world
import pytest


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return ep_world.start("ep_engines_cases", 2, tmp_path_factory.mktemp("ranks"), only=ep_world.selected(request))


@pytest.mark.parametrize("case", [case.__name__ for case in ep_engines_cases.CASES])
def test_experts_between(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)
