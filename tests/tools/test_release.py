"""`make release` without kernels leaves a wheel, the sdist and the folder for the Hub in dist/."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "build", "dist", "tests", "docs", "__pycache__", "*.so")
LOAD = """
import importlib.util, sys
from pathlib import Path
folder = Path(sys.argv[1])
if importlib.util.find_spec("kernels"):
    from kernels import get_local_kernel
    module = get_local_kernel(folder, backend="cpu")
else:  # as its documentation says that it loads
    file = folder / "build" / "torch-cpu" / "__init__.py"
    spec = importlib.util.spec_from_file_location("_fusible_cpu_abc", file)
    module = sys.modules["_fusible_cpu_abc"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
import fusible
assert module.GroupedLinear is fusible.GroupedLinear
print(module.__name__, fusible.__file__)
if importlib.util.find_spec("transformers"):
    import transformers.modeling_utils  # as every model does
    from transformers.integrations.moe import ExpertsInterface
    assert "fusible" in ExpertsInterface()
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a copy of the tree was released to."""
    missing = {"pip", "setuptools", "pybind11", "ninja"} - {installed.name for installed in distributions()}
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    tree = tmp_path_factory.mktemp("release") / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    (tree / ".venv").symlink_to(sys.prefix)
    offline = {"PIP_NO_INDEX": "1", "FUSIBLE_BUILD_CUDA": "0", "PYTHONS": sys.executable}
    for command in re.findall(r'^(?:"\$python" )?(?:\.ci|setup\.py).*$', (ROOT / ".ci" / "release").read_text(), re.M):
        script = f"set -e; python=.venv/bin/python; {command.replace('$(git rev-parse --short=9 HEAD)', 'abc')}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tree, env={**os.environ, **offline}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist"


def test_a_wheel_has_the_package_and_the_sdist_its_sources(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as sources:
        in_wheel, in_sdist = {*archive.namelist()}, {name.partition("/")[2] for name in sources.getnames()}

    assert wheel.name.endswith("-py3-none-any.whl")
    assert {"fusible/__init__.py", "fusible/ops/ep/group.py", "fusible/py.typed"} <= in_wheel
    assert {"setup.py", "README.md", "LICENSE", "csrc/bindings.cpp", "src/fusible/ops/ep/group.py"} <= in_sdist
    assert [path for path in in_wheel if path.startswith(("tests", "csrc"))] == []


def test_twine_is_content(dist: Path) -> None:
    pytest.importorskip("twine")
    files = [str(path) for pattern in ("*.whl", "*.tar.gz") for path in dist.glob(pattern)]
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("PASSED") == 2


def test_each_variant_says_what_is_in_it(dist: Path) -> None:
    variants = sorted((dist / "kernel" / "build").iterdir())

    assert [variant.name for variant in variants] == ["torch-cpu", "torch-cuda"]
    for variant in variants:
        facts = json.loads((variant / "metadata.json").read_text())
        files = {str(f.relative_to(variant)) for f in variant.rglob("*") if f.is_file() and f.name != "metadata.json"}
        assert facts["id"] == f"_fusible_{variant.name.removeprefix('torch-')}_abc"
        assert {*facts["digest"]["files"]} == files
        first = hashlib.sha256((variant / "__init__.py").read_bytes()).digest()
        assert facts["digest"]["files"]["__init__.py"] == base64.b64encode(first).decode()


def test_the_extension_of_each_wheel_is_in_the_variant_of_gpus_alone(tmp_path: Path) -> None:
    for python in ("311", "312"):
        with zipfile.ZipFile(tmp_path / f"fusible-1-cp{python}.whl", "w") as wheel:
            for name in ("__init__.py", "ops/_C.pyi", f"ops/_C.cpython-{python}-x86_64-linux-gnu.so"):
                wheel.writestr(f"fusible/{name}", "")
            wheel.writestr("fusible-1.dist-info/METADATA", "")
    subprocess.run([sys.executable, ROOT / ".ci" / "kernel_folder.py", tmp_path, "abc"], check=True)
    build = tmp_path / "kernel" / "build"

    assert sorted(path.name[:14] for path in build.rglob("*.so")) == ["_C.cpython-311", "_C.cpython-312"]
    assert [*build.glob("torch-cpu/**/*.so")] == []
    assert sorted(path.name for path in (build / "torch-cpu" / "fusible" / "ops").iterdir()) == ["_C.pyi"]


def test_the_folder_loads_and_registers_the_experts(dist: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if find_spec("kernels") is not None:  # from wherever it was found
        environment["PYTHONPATH"] = str(Path(find_spec("kernels").origin).parents[1])  # type: ignore[union-attr, arg-type]
    folder = dist / "kernel"
    command = [sys.executable, "-c", LOAD, str(folder)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_fusible_cpu_abc", str(folder / "build" / "torch-cpu" / "fusible" / "__init__.py")]
