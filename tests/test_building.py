"""setup.py builds wherever the checkout and CUDA lie, with an nvcc that only pretends to compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 12.8, V12.8.93" && exit
while [ $# -gt 0 ]; do
  case "$1" in
    -o) shift; echo object > "$1" ;;
    -MF) shift; echo "" > "$1" ;;
  esac
  shift
done
"""
NAMES = ["plain", "a b", "price$HOME", "it's;touch pwned;y", "a:b", "$in", "$(touch pwned)"]


@pytest.fixture
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a build reads, and nvcc in a folder beside it; both folders have the name that is asked for."""
    for package in ("ninja", "pybind11", "setuptools"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    tree, home = tmp_path / "tree" / request.param, tmp_path / "cuda" / request.param
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text(NVCC)
    (home / "bin" / "nvcc").chmod(0o755)
    (tree / "fusible" / "ops").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tree)
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    return tree


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    home = tree.parent.parent / "cuda" / tree.name
    variables = {**os.environ, "FUSIBLE_BUILD_CUDA": "1", "CUDA_HOME": str(home), **environment}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("checkout", NAMES, indirect=True)
def test_builds_at_any_path(checkout: Path) -> None:
    for _ in range(2):  # a second build finds all of it
        done = build(checkout)
        assert done.returncode == 0, done.stdout + done.stderr
    (library,) = (checkout / "fusible" / "ops").iterdir()

    assert library.name.startswith("_C.")
    assert library.read_text() == "object\n"
    assert {path.name for path in checkout.iterdir()} == {"setup.py", "csrc", "fusible", "build"}
    assert {path.name for path in checkout.parent.iterdir()} == {checkout.name}


@pytest.mark.parametrize("checkout", ["plain"], indirect=True)
@pytest.mark.parametrize("choice", ["", "auto"])
def test_an_empty_choice_is_auto(checkout: Path, choice: str) -> None:
    done = build(checkout, FUSIBLE_BUILD_CUDA=choice, CUDA_HOME=str(checkout / "nowhere"))

    assert done.returncode == 0, done.stderr
    assert "CUDA kernels are not built: no nvcc in CUDA_HOME=" in done.stderr


@pytest.mark.parametrize("checkout", ["plain"], indirect=True)
@pytest.mark.parametrize(("choice", "message"), [("1", "FUSIBLE_BUILD_CUDA=1, but no nvcc"), ("yes", "must be auto")])
def test_a_choice_that_cannot_be_followed_is_an_error(checkout: Path, choice: str, message: str) -> None:
    done = build(checkout, FUSIBLE_BUILD_CUDA=choice, CUDA_HOME=str(checkout / "nowhere"))

    assert done.returncode != 0
    assert message in done.stderr
