"""The transport ``symmetric``: our kernels on the CPU, on memory that processes share, at the same time.

The bits of one process, errors, and faults that are planted in the protocol, each of which is seen.
"""

from __future__ import annotations

import os

import ep_symmetric_cases
import ep_world
import pytest
from emulation import build, harness

from fusible.ops.kernels.hopper import peers

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")


FOUR = pytest.param(4, marks=pytest.mark.skipif((os.cpu_count() or 1) < 4, reason="four ranks wait for one another"))


@pytest.fixture(scope="module", params=[2, FOUR], ids=["2 ranks", "4 ranks"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the ranks say of every case."""
    build.build()  # once, not by every rank
    folder = tmp_path_factory.mktemp("ranks")
    return ep_world.start("ep_symmetric_cases", request.param, folder, wait=600, transport="symmetric")


@pytest.mark.parametrize("case", [case.__name__ for case in ep_symmetric_cases.CASES])
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


def test_the_host_and_the_kernels_agree_on_what_they_share(emulation: harness.Emulation) -> None:
    assert emulation.MAX_RANKS == peers.MAX_RANKS
    assert emulation.SIGNAL_BYTES == peers.SIGNAL_BYTES
    assert emulation.LANE_STATE_BYTES == peers.STATE_BYTES
