"""Megatron-Core's own MoE layer on two processes: our flex dispatcher gives what its all-to-all one gives."""

from __future__ import annotations

import warnings

import ep_world
import pytest
from emulation import build

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ep_megatron_cases
        import ep_megatron_zero_copy
except ImportError as error:
    pytest.skip(f"megatron-core cannot be imported: {error}", allow_module_level=True)

MODULES = {"ep_megatron_cases": "collective", "ep_megatron_zero_copy": "symmetric"}
NAMES = [
    (module.__name__, case.__name__) for module in (ep_megatron_cases, ep_megatron_zero_copy) for case in module.CASES
]


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of the ranks on the cases of a file."""
    transport = MODULES[request.param]
    if transport == "symmetric" and build.missing() is not None:
        pytest.skip(f"cannot be built: {build.missing()}")
    folder, only = tmp_path_factory.mktemp(request.param), ep_world.selected(request)
    return ep_world.start(request.param, 2, folder, transport=transport, only=only)


@pytest.mark.parametrize(("said", "case"), NAMES, indirect=["said"], scope="module")
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)
