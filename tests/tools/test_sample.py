"""The cases that ``--sample`` leaves out: of tests that have many, and of tools; over all parts, none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import ALIKE, ONCE, PARTS, QUARTERS, SLOW, WHOLE, sample

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}


def items(file: str, cases: int, tests: Sequence[str] = ("test_one", "test_two")) -> list[Any]:
    """Tests of so many cases each, in a file."""
    return [
        SimpleNamespace(path=FILES[file], function=test, name=f"{test}[{case}]")
        for test in tests
        for case in range(cases)
    ]


def test_parts_have_a_case_of_every_test_and_together_all() -> None:
    whole = items("test_properties", 100)
    parts = [sample(whole, part) for part in range(PARTS)]

    for kept, left_out in parts:
        assert sorted(item.name for item in [*kept, *left_out]) == sorted(item.name for item in whole)
        assert {item.function for item in kept} == {"test_one", "test_two"}
        assert 0.02 < len(kept) / len(whole) < 0.15
    assert {item.name for kept, _ in parts for item in kept} == {item.name for item in whole}


def test_files_whose_cases_are_no_grid_are_whole() -> None:
    for file in WHOLE:
        assert sample(items(file, 10), 1)[1] == []


def test_some_tests_are_each_in_one_part() -> None:
    for file in ONCE:
        whole = items(file, 3)
        kept = [item.name for part in range(PARTS) for item in sample(whole, part)[0]]
        assert sorted(kept) == sorted(item.name for item in whole)


def test_tests_that_are_alike_are_in_every_fourth_part() -> None:
    for file in ALIKE:
        assert file in SLOW or "emulation" in FILES[file].read_text(), "the quick tests run one part alone"
        whole = [item for i in range(6) for item in items(file, 20, (f"test_{i}",))]
        parts = [sample(whole, part)[0] for part in range(PARTS)]
        ran = [{item.function for item in kept} for kept in parts]

        assert {item.name for kept in parts for item in kept} == {item.name for item in whole}
        assert all(1 <= len(tests) <= 2 for tests in ran)
        assert {test: sum(test in tests for tests in ran) for test in set().union(*ran)} == {
            f"test_{i}": PARTS // QUARTERS for i in range(6)
        }


def test_ci_knows_how_many_parts_there_are() -> None:
    assert f"% {PARTS}))" in (ROOT / ".ci" / "run").read_text()


def test_the_option_leaves_out_cases() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--sample", "2"]
    printed = subprocess.run(
        [*command, str(FILES["test_quantisers"])], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout

    assert "deselected" in printed
