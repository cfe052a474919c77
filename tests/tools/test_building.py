"""setup.py builds wherever the checkout and CUDA lie, with an nvcc that only pretends to compile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    """The files that a build reads, and nvcc in a folder beside them; both folders have the requested name."""
    for package in ("ninja", "pybind11", "setuptools"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    tree, home = tmp_path / "tree" / request.param, tmp_path / "cuda" / request.param
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text(NVCC)
    (home / "bin" / "nvcc").chmod(0o755)
    (tree / "src" / "fusible" / "ops").mkdir(parents=True)
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
    (library,) = (checkout / "src" / "fusible" / "ops").iterdir()

    assert library.name.startswith("_C.")
    assert library.read_text() == "object\n"
    assert {path.name for path in checkout.iterdir()} == {"setup.py", "csrc", "src", "build"}
    assert {path.name for path in checkout.parent.iterdir()} == {checkout.name}


@pytest.mark.parametrize("checkout", ["plain"], indirect=True)
@pytest.mark.parametrize("choice", ["", "auto"])
def test_an_empty_choice_is_auto(checkout: Path, choice: str) -> None:
    done = build(checkout, FUSIBLE_BUILD_CUDA=choice, CUDA_HOME=str(checkout / "nowhere"))

    assert done.returncode == 0, done.stderr
    assert "CUDA kernels are not built: no nvcc in CUDA_HOME=" in done.stderr
    assert note_in(checkout).startswith("no nvcc in CUDA_HOME=")


def pretend(tree: Path, capabilities: str) -> str:
    """PATH with an nvidia-smi that reports GPUs of these compute capabilities, a line each."""
    folder = tree.parent.parent / "tools"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{capabilities}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def note_in(tree: Path) -> str:
    """The package's note on kernels that it does not have."""
    return (tree / "src" / "fusible" / "ops" / "left_out.txt").read_text()


@pytest.mark.parametrize("checkout", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("capabilities", "seen"), [("8.0\n12.0\n", "only compute capability 8.0, 12.0"), ("", "no GPU")]
)
def test_auto_leaves_the_kernels_out_where_no_hopper_gpu_is_visible(
    checkout: Path, capabilities: str, seen: str
) -> None:
    done = build(checkout, FUSIBLE_BUILD_CUDA="auto", PATH=pretend(checkout, capabilities))

    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("fusible: "))
    assert f"no Hopper GPU is visible, {seen}" in line
    assert "FUSIBLE_BUILD_CUDA=1" in line
    assert f"no Hopper GPU is visible, {seen}" in note_in(checkout)


@pytest.mark.parametrize("checkout", ["plain"], indirect=True)
def test_auto_compiles_where_a_hopper_gpu_is_visible(checkout: Path) -> None:
    build(checkout, FUSIBLE_BUILD_CUDA="0")
    assert note_in(checkout) == "FUSIBLE_BUILD_CUDA=0\n"
    done = build(checkout, FUSIBLE_BUILD_CUDA="auto", PATH=pretend(checkout, "8.9\n9.0\n"))

    assert done.returncode == 0, done.stderr
    (library,) = (checkout / "src" / "fusible" / "ops").iterdir()  # no note any more
    assert library.name.startswith("_C.")


@pytest.mark.parametrize("checkout", ["plain"], indirect=True)
def test_a_line_for_each_source_says_how_many_are_done(checkout: Path) -> None:
    lines = [line for line in build(checkout).stdout.splitlines() if line.startswith("[")]
    sources = [path for path in (checkout / "csrc").rglob("*") if path.suffix in (".cu", ".cpp")]
    total = len(sources) + 1  # and the link

    assert [line.split(",")[0] for line in lines] == [f"[{i}/{total}" for i in range(1, total + 1)]
    assert re.fullmatch(rf"\[1/{total}, [\d.]+ s\] nvcc csrc/\S+", lines[0])


@pytest.mark.parametrize("checkout", ["plain"], indirect=True)
def test_kernels_that_are_left_out_cannot_be_listed(checkout: Path) -> None:
    home = checkout.parent.parent / "cuda" / checkout.name
    variables = {**os.environ, "FUSIBLE_BUILD_CUDA": "0", "CUDA_HOME": str(home)}
    command = [sys.executable, "setup.py", "kernels"]
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "there are no kernels to list: FUSIBLE_BUILD_CUDA=0" in done.stderr


@pytest.mark.parametrize("checkout", ["plain"], indirect=True)
@pytest.mark.parametrize(("choice", "message"), [("1", "FUSIBLE_BUILD_CUDA=1, but no nvcc"), ("yes", "must be auto")])
def test_a_choice_that_cannot_be_followed_is_an_error(checkout: Path, choice: str, message: str) -> None:
    done = build(checkout, FUSIBLE_BUILD_CUDA=choice, CUDA_HOME=str(checkout / "nowhere"))

    assert done.returncode != 0
    assert message in done.stderr
