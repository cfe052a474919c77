"""Who may import whom: the compiler knows no op, only the doors know the kernels, packages import relatively."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOORS = ("kernels.py", "routing.py", "routed_mlp.py", "routed_backward.py")  # to products, routing, whole layers
VALUES = "problem"  # the statement of a grouped GEMM: a value that ops may share with the backends


def imports(path):
    """The dotted names that a file imports, relative ones resolved from the root: "ops.backends.loop"."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", files("fuser"), ids=lambda p: p.name)
def test_the_compiler_imports_no_op(path):
    forbidden = ("ops", "integrations", "fusible", "csrc", "tests")
    assert not [name for name in imports(path) if name.split(".")[0] in forbidden]


@pytest.mark.parametrize("path", files("ops"), ids=lambda p: p.name)
def test_ops_import_no_integration(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "integrations"]


def backends_of(path):
    """The modules of the backends that a file imports, but for values that all may share."""
    return {name.split(".")[2] for name in imports(path) if name.startswith("ops.backends")} - {VALUES}


@pytest.mark.parametrize("name", DOORS)
def test_a_door_imports_backends(name):
    assert backends_of(ROOT / "ops" / name)


@pytest.mark.parametrize(
    "path",
    [p for p in files("ops") if p.parent.name != "backends" and p.relative_to(ROOT / "ops").as_posix() not in DOORS],
    ids=lambda p: p.name,
)
def test_only_the_doors_import_backends(path):
    assert backends_of(path) == set()


@pytest.mark.parametrize("path", files("fuser", "ops", "integrations"), ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_relatively(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "fusible"]


def test_backends_import_no_op():
    allowed = ("ops.backends", "ops.activations", "ops.grouped_tensor", "ops._C")
    found = [name for path in files("ops/backends") for name in imports(path) if name.startswith("ops.")]

    assert found
    assert all(name.startswith(allowed) for name in found)
