"""Without jax everything else works, the tests of ``fusible.jax`` are skipped, and what needs it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ABSENT = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax") else find(name, path, target)

PathFinder.find_spec = classmethod(find_spec)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python as it is on a machine without jax."""
    (folder / "sitecustomize.py").write_text(ABSENT)
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, cwd=ROOT
    )


def test_everything_else_works(tmp_path: Path) -> None:
    code = """
import torch, fusible
model = fusible.Sequential(fusible.GroupedLinear(2, 8, 16), fusible.SwiGLU(), fusible.GroupedLinear(2, 8, 8))
print(list(model(torch.randn(4, 8), split_sizes=torch.tensor([1, 3])).shape), "jax" in dir(fusible))
try:
    import fusible.jax
except ModuleNotFoundError as error:
    print(error)
"""
    done = run(tmp_path, "-c", code)

    assert done.stdout == "[4, 8] True\nNo module named 'jax'\n", done.stderr


def test_the_benchmark_says_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "fusible", "bench", "jax")

    assert done.returncode == 1
    assert "needs jax (pip install jax)" in done.stderr


def test_tests_of_it_are_skipped(tmp_path: Path) -> None:
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_jax*.py"))]
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *files)

    assert done.returncode in (0, 5), done.stdout + done.stderr
    assert "failed" not in done.stdout
    assert done.stdout.count("is not installed") == len(files)
