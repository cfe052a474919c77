"""Expert parallelism between hosts: ranks in two network namespaces, over gloo and a virtual wire."""

from __future__ import annotations

import ep_hosts_cases
import ep_world
import pytest
import two_hosts

pytestmark = pytest.mark.skipif(two_hosts.refusal() is not None, reason=f"no two hosts here: {two_hosts.refusal()}")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of a rank on each host on the cases."""
    folder, only = tmp_path_factory.mktemp("hosts"), ep_world.selected(request)
    with two_hosts.two_hosts(2) as launcher:
        return ep_world.start("ep_hosts_cases", 2, folder, only=only, launcher=launcher)


@pytest.mark.parametrize("case", [case.__name__ for case in ep_hosts_cases.CASES])
def test_on_two_hosts(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


def test_a_model_of_transformers_trains_on_two_hosts(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("fusible.integrations.transformers_ep", exc_type=ImportError)
    case, folder = "sharded_by_fsdp", tmp_path_factory.mktemp("models")
    with two_hosts.two_hosts(2) as launcher:
        said = ep_world.start("ep_transformers_cases", 2, folder, only=[case], launcher=launcher)

    ep_world.assert_passed(case, said)
