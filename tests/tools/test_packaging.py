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

import pytest

import fusible

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fuser", "ops", "integrations", "benchmarks", "examples")


def sources(*folders: str) -> Iterator[Path]:
    return (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def run(code: str) -> str:
    """The output of a fresh interpreter, started outside the tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_links_are_relative(package: str) -> None:
    link = ROOT / "src" / "fusible" / package

    assert link.is_symlink()
    assert os.readlink(link) == f"../../{package}"


def test_every_module_loads_once_and_every_fusion_registers_once() -> None:
    code = """
import importlib, importlib.util, pkgutil, sys
from collections import Counter
from pathlib import Path
import fusible
from fusible.fuser import registry
print(sorted(f.name for f in registry))
missing = [f"integrations.{name}" for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
# torchtitan and Megatron-Core warn while they are imported
missing += [f"integrations.{name}" for name in ("torchtitan", "torchtitan_dispatcher", "megatron_dispatcher")]
missing += ["fusible.jax"] * (importlib.util.find_spec("jax") is None)
missing += ["examples.jax_moe_lm"] * any(importlib.util.find_spec(name) is None for name in ("jax", "flax"))
left_out = ("__main__", "_C", *missing)
for module in pkgutil.walk_packages(fusible.__path__, "fusible."):
    if not module.name.endswith(left_out) and "triton.device." not in module.name:
        importlib.import_module(module.name)
files = Counter(Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None))
root = Path(fusible.__file__).resolve().parents[2]
ours = {f: n for f, n in files.items() if f.is_relative_to(root) and f.relative_to(root).parts[0] in FOLDERS}
print([str(f) for f, n in ours.items() if n > 1])
print(len(ours) > 40)
"""
    fusions, twice, many = run(f"FOLDERS = {('src', *PACKAGES)}\n{code}").splitlines()

    linears = "'GroupedLinearChain', 'GroupedLinearGLU', 'GroupedLinearResidual'"
    layers = "'GroupedMLP', 'PointwiseChain', 'RoutedLoRA', 'RoutedMLP'"
    assert fusions == f"['EPGroupedMLP', 'GLUScale', {linears}, {layers}]"
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


def imports(*folders: str) -> Iterator[tuple[str, str]]:
    """(file, module) of every import."""
    for path in sources(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                yield path.name, node.module or ""
            elif isinstance(node, ast.Import):
                yield from ((path.name, name.name) for name in node.names)


def test_library_does_not_import_benchmarks_or_examples() -> None:
    assert [i for i in imports("fuser", "ops", "integrations") if {"benchmarks", "examples"} & {*i[1].split(".")}] == []


@pytest.mark.parametrize("name", ["conftest.py", "__init__.py", "fusible"])  # it would hide what is installed
def test_root_is_no_package(name: str) -> None:
    assert not (ROOT / name).exists()


@pytest.mark.parametrize("path", [*sources("src/fusible", *PACKAGES)], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_functions_are_short(path: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]

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
