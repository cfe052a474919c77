"""Expert parallelism of transformers on our exchange: models on several processes train like one process."""

from __future__ import annotations

import subprocess
import sys

import ep_world
import pytest
from emulation import build

try:
    import ep_transformers_cases
except ImportError as error:
    pytest.skip(f"transformers has no expert parallelism: {error}", allow_module_level=True)


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of two ranks on the cases."""
    return ep_world.start("ep_transformers_cases", 2, tmp_path_factory.mktemp("two"), only=ep_world.selected(request))


@pytest.mark.parametrize("case", [case.__name__ for case in ep_transformers_cases.CASES])
def test_on_two_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


@pytest.fixture(scope="module")
def said_by_four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of four ranks on theirs."""
    folder, only = tmp_path_factory.mktemp("four"), ep_world.selected(request)
    return ep_world.start("ep_transformers_cases_of_four", 4, folder, only=only)


@pytest.mark.parametrize("case", [case.__name__ for case in ep_transformers_cases.ON_FOUR])
def test_on_four_ranks(case: str, said_by_four: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said_by_four)


@pytest.fixture(scope="module")
def said_of_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of two ranks whose memory is shared: the kernels run on the CPU."""
    build.build()  # once, not by every rank
    folder, only = tmp_path_factory.mktemp("memory"), ep_world.selected(request)
    return ep_world.start("ep_transformers_cases_symmetric", 2, folder, transport="symmetric", only=only)


@pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
@pytest.mark.parametrize("case", [case.__name__ for case in ep_transformers_cases.SYMMETRIC])
def test_on_ranks_that_share_memory(case: str, said_of_memory: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said_of_memory)


WITHOUT = """
import sys
sys.modules["transformers.distributed.expert_parallel"] = None  # as before transformers 5.24
import fusible.integrations.transformers
from transformers.integrations.moe import ExpertsInterface
assert "fusible" in ExpertsInterface()
assert "fusible.integrations.transformers_ep" not in sys.modules
"""


def test_older_transformers_have_our_experts_alone() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


def test_both_names_are_there_after_an_import_of_fusible() -> None:
    program = "import fusible, transformers.modeling_utils, transformers.distributed.expert_parallel as theirs; "
    program += "assert {'fusible', 'fusible_symmetric'} <= {*theirs.EPImplementationInterface()}"
    subprocess.run([sys.executable, "-c", program], check=True)
