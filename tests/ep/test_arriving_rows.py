"""Rows that another kernel brings while a product runs: our kernels on the CPU, in two processes at the same time."""

from __future__ import annotations

import ep_arriving_cases
import ep_world
import pytest
from emulation import build

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of both ranks on the cases."""
    build.build()  # once, not by every rank
    folder, only = tmp_path_factory.mktemp("ranks"), ep_world.selected(request)
    return ep_world.start("ep_arriving_cases", 2, folder, transport="symmetric", only=only)


@pytest.mark.parametrize("case", [case.__name__ for case in ep_arriving_cases.CASES])
def test_on_both_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)
