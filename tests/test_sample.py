"""What ``--sample`` leaves out: cases of large grids, never a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def collected(*options: str) -> list[str]:
    """Names of the tests of a large grid and of a file that has none."""
    files = [str(ROOT / "tests" / name) for name in ("test_quantize_kernels.py", "test_imports.py")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, *files]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in printed.splitlines() if "::" in line]


def test_every_test_keeps_a_case_and_small_grids_keep_all() -> None:
    whole, part = collected(), collected("--sample")
    large = [name for name in whole if "test_quantize_kernels" in name]
    left = [name for name in part if "test_quantize_kernels" in name]

    assert [name for name in part if name not in left] == [name for name in whole if name not in large]
    assert set(left) < set(large)
    assert 0.3 < len(left) / len(large) < 0.7
    assert {name.split("[")[0] for name in left} == {name.split("[")[0] for name in large}
