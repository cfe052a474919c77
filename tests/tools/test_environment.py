"""Switches from environment variables: defaults for jobs whose code one cannot edit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusible import config
from fusible.fuser.contract.config import active_config, config_of, defaults_of

ROOT = Path(__file__).parents[2]
CODE = "import threading, fusible; from fusible.fuser.contract.config import active_config as c; print(c()); "
CODE += "t = threading.Thread(target=lambda: print(c())); t.start(); t.join()"


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    """Prints the switches of two threads of a fresh process."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=variables, check=False)


def test_a_process_starts_with_what_its_environment_says() -> None:
    done = start(FUSIBLE_STRICT="1", FUSIBLE_BACKEND="loop", FUSIBLE_DISABLE_FUSIONS="RoutedMLP, GroupedMLP")
    first, second = done.stdout.splitlines()

    assert first == second
    assert "strict=True" in first
    assert "backend='loop'" in first
    assert "debug=False" in first
    assert "RoutedMLP" in first
    assert "'GroupedMLP'" in first


def test_a_wrong_value_is_an_error_at_import() -> None:
    done = start(FUSIBLE_DEBUG="yes")

    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "ValueError: FUSIBLE_DEBUG must be one of 0, 1, got 'yes'"


@pytest.mark.parametrize(
    ("environment", "switches"),
    [
        ({}, {}),
        ({"FUSIBLE_STRICT": "", "FUSIBLE_BACKEND": " ", "FUSIBLE_DISABLE_FUSIONS": ""}, {}),
        ({"FUSIBLE_STRICT": "0", "FUSIBLE_DEBUG": "1"}, {"debug": True}),
        ({"FUSIBLE_STRICT": "1"}, {"strict": True}),
        ({"FUSIBLE_BACKEND": "grouped_mm"}, {"backend": "grouped_mm"}),
        ({"FUSIBLE_DISABLE_FUSIONS": "A,,B "}, {"disable_fusions": frozenset({"A", "B"})}),
    ],
)
def test_what_variables_say(environment: dict[str, str], switches: dict[str, object]) -> None:
    assert defaults_of(environment) is config_of(**switches)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FUSIBLE_STRICT": "true"}, "FUSIBLE_STRICT must be one of 0, 1, got 'true'"),
        (
            {"FUSIBLE_BACKEND": "cuda"},
            "FUSIBLE_BACKEND must be one of auto, hopper, triton, grouped_mm, loop, got 'cuda'",
        ),
    ],
)
def test_values_that_variables_cannot_have(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        defaults_of(environment)


def test_code_overrides_the_environment() -> None:
    before = active_config()
    with config(strict=True), config(strict=False):
        assert not active_config().strict
    assert active_config() is before
