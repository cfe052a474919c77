"""``combine="reduced"`` of the transport ``symmetric``: our kernels on the CPU, in processes that share memory.

The bits of the transport ``collective``, and faults that are planted in the protocol, each of which is seen.
"""

from __future__ import annotations

import ep_reduced_cases
import ep_world
import pytest
from emulation import build

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")


CASES = [case.__name__ for case in ep_reduced_cases.CASES]
FEW = ("tokens_say_where_they_come_from_in_sums_by_rank", "sums_are_near_those_in_float64", "no_fault_no_wrong_sum")
"""The cases that four ranks run where they share fewer CPUs: see ``ep_world.said_by``."""


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of the ranks on the cases."""
    build.build()
    return ep_world.said_by(request, tmp_path_factory.mktemp("ranks"), "ep_reduced_cases", CASES, FEW)


@pytest.mark.parametrize("case", CASES)
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)
