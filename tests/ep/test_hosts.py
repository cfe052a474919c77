"""Expert parallelism between hosts: ranks in two network namespaces, over gloo and a virtual wire.

Where there can be no namespaces, the hosts of rails have names alone, and the other tests are skipped.
"""

from __future__ import annotations

from contextlib import nullcontext

import ep_hosts_cases
import ep_rails_cases
import ep_world
import pytest
import two_hosts
from emulation import build

from fusible.ops.ep.memory import Location
from fusible.ops.ep.rails import Hosts

REFUSAL = two_hosts.refusal()
needs_hosts = pytest.mark.skipif(REFUSAL is not None, reason=f"no two hosts here: {REFUSAL}")
needs_kernels = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of a rank on each host on the cases."""
    folder, only = tmp_path_factory.mktemp("hosts"), ep_world.selected(request)
    with two_hosts.two_hosts(2) as launcher:
        return ep_world.start("ep_hosts_cases", 2, folder, only=only, launcher=launcher)


@needs_hosts
@pytest.mark.parametrize("case", [case.__name__ for case in ep_hosts_cases.CASES])
def test_on_two_hosts(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


@needs_hosts
def test_a_model_of_transformers_trains_on_two_hosts(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("fusible.integrations.transformers_ep", exc_type=ImportError)
    case, folder = "sharded_by_fsdp", tmp_path_factory.mktemp("models")
    with two_hosts.two_hosts(2) as launcher:
        said = ep_world.start("ep_transformers_cases", 2, folder, only=[case], launcher=launcher)

    ep_world.assert_passed(case, said)


@pytest.fixture(scope="module")
def said_of_rails(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of two ranks on each host; inside of a host, kernels run on the CPU."""
    build.build()  # once, not by every rank
    folder, only = tmp_path_factory.mktemp("rails"), ep_world.selected(request)
    hosts = two_hosts.two_hosts(4) if REFUSAL is None else nullcontext(lambda rank: [])
    with hosts as launcher:
        return ep_world.start("ep_rails_cases", 4, folder, 900, "symmetric", only=only, launcher=launcher)


@pytest.mark.parametrize("names", ["aab", "abb", "abca", "aabbc", "abab", "aabbaa", "abbb"])
def test_rails_need_equally_many_consecutive_ranks_on_each_host(names: str) -> None:
    ranks = [Location(name, 0) for name in names]

    for rank in range(len(ranks)):
        why = Hosts.of(ranks, rank).refusal(ranks)
        assert why is not None
        assert "needs equally many ranks on each host, in consecutive order" in why


@pytest.mark.parametrize("names", ["ab", "aabb", "aabbcc"])
def test_rails_connect_hosts_of_equally_many_ranks(names: str) -> None:
    ranks = [Location(name, 0) for name in names]

    assert [Hosts.of(ranks, rank).refusal(ranks) for rank in range(len(ranks))] == [None] * len(ranks)


@needs_kernels
@pytest.mark.parametrize("case", [case.__name__ for case in ep_rails_cases.CASES])
def test_rails_between_two_hosts(case: str, said_of_rails: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said_of_rails)
