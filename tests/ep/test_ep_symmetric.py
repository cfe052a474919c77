"""The transport ``symmetric``: our kernels on the CPU, on memory that processes share, at the same time.

The bits of one process, errors, and faults that are planted in the protocol, each of which is seen.
"""

from __future__ import annotations

from pathlib import Path

import ep_failures
import ep_symmetric_cases
import ep_world
import pytest
from emulation import build, harness

from fusible.ops.kernels.hopper import peers

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")


CASES = [case.__name__ for case in ep_symmetric_cases.CASES]
FEW = ("no_fault_no_error", "tokens_say_where_they_come_from", "a_signal_before_the_copy_is_seen")
"""The cases that four ranks run where they share fewer CPUs: see ``ep_world.said_by``."""


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of the ranks on the cases."""
    build.build()  # once, not by every rank
    return ep_world.said_by(request, tmp_path_factory.mktemp("ranks"), "ep_symmetric_cases", CASES, FEW)


@pytest.mark.parametrize("case", CASES)
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


def test_a_process_that_ends_is_an_error_for_the_others(tmp_path: Path) -> None:
    case = ep_failures.a_rank_that_ends_in_the_middle_is_an_error_for_the_others.__name__
    build.build()
    said = ep_world.start("ep_failures", 3, tmp_path, transport="symmetric", only=[case])

    assert said[case] == ["", ""], said


def test_the_host_and_the_kernels_agree_on_what_they_share(emulation: harness.Emulation) -> None:
    assert emulation.MAX_RANKS == peers.MAX_RANKS
    assert emulation.SIGNAL_BYTES == peers.SIGNAL_BYTES
    assert emulation.LANE_STATE_BYTES == peers.STATE_BYTES
