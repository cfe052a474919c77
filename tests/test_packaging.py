"""The layout on disk is the import layout: conditions under which that works, and what breaks if one is given up."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest

import fusible

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fuser", "ops", "benchmarks", "examples")


def sources(*folders: str) -> Iterator[Path]:
    return (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def run(code: str) -> str:
    """What a fresh interpreter prints, started outside the tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_links_are_relative(package: str) -> None:
    link = ROOT / "fusible" / package

    assert link.is_symlink()
    assert os.readlink(link) == f"../{package}"


def test_every_module_loads_once_and_every_fusion_registers_once() -> None:
    code = """
import importlib, pkgutil, sys
from collections import Counter
from pathlib import Path
import fusible
from fusible.fuser import registry
print(sorted(f.name for f in registry))
for module in pkgutil.walk_packages(fusible.__path__, "fusible."):
    if not module.name.endswith(("__main__", "_C")):
        importlib.import_module(module.name)
files = Counter(Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None))
root = Path(fusible.__file__).resolve().parent.parent
print([str(f) for f, n in files.items() if n > 1 and f.is_relative_to(root)])
print(sum(f.is_relative_to(root) for f in files) > 40)
"""
    fusions, twice, many = run(code).splitlines()

    assert fusions == "['GLUScale', 'GroupedLinearGLU', 'GroupedMLP']"
    assert twice == "[]"
    assert many == "True"


def test_import_does_not_initialise_cuda() -> None:
    assert run("import fusible, torch; print(torch.cuda.is_initialized())") == "False\n"


def test_packages_do_not_load_under_their_bare_names() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
try:
    import ops
except ImportError as error:
    print(error)
"""
    assert "beyond top-level package" in run(code)


class Import(NamedTuple):
    file: str
    module: str
    dots: int


def imports(*folders: str) -> Iterator[Import]:
    """Every import of every file."""
    for path in sources(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                yield Import(path.name, node.module or "", node.level)
            elif isinstance(node, ast.Import):
                yield from (Import(path.name, name.name, 0) for name in node.names)


def test_imports_inside_fuser_and_ops_are_relative() -> None:
    assert [i for i in imports("fuser", "ops") if i.module.startswith("fusible") and not i.dots] == []


def test_fuser_knows_no_op() -> None:
    assert [i for i in imports("fuser") if i.module.split(".")[0] == "ops" and i.dots] == []


def test_library_does_not_import_benchmarks_or_examples() -> None:
    assert [i for i in imports("fuser", "ops") if {"benchmarks", "examples"} & {*i.module.split(".")}] == []


@pytest.mark.parametrize("name", ["conftest.py", "__init__.py"])
def test_root_is_no_package(name: str) -> None:
    assert not (ROOT / name).exists()


@pytest.mark.parametrize("path", [*sources("fusible", *PACKAGES)], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_file_and_its_functions_are_short(path: Path) -> None:
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]

    assert len(text.splitlines()) <= 300
    assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= 60] == []


def test_version_is_stated_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert project["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", fusible.__version__)


def test_installed_version_is_ours() -> None:
    try:
        installed = version("fusible")
    except PackageNotFoundError:
        pytest.skip("fusible is not installed; it is used from the tree")

    assert installed == fusible.__version__


def test_everything_public_is_there_and_documented() -> None:
    bare = [n for n in fusible.__all__ if n[0] != "_" and callable(o := getattr(fusible, n)) and not o.__doc__]

    assert bare == []
