"""Who may import whom: the compiler knows no op, only the doors know the kernels, packages import relatively."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOORS = ("routing.py", "inference.py")  # to routing, and to what reads routed rows
SHARED = (
    "ops.kernels.problem",
    "ops.kernels.outputs",
    "ops.kernels.custom_ops",
)  # values, and what only has to be loaded

CONTRACT = {"config", "edits", "errors", "module_state", "op", "overrides", "parametrized", "spec", "tracing"}
ARROWS = {  # part of fuser -> what it may import besides the files of the op contract; nothing stands above its row
    "runtime": set(),
    "composite": {"runtime"},
    "compiler": {"composite", "runtime"},
    "replay": {"compiler", "runtime"},
    "dynamo": {"compiler", "runtime"},
    "explain": {"compiler", "runtime"},
    "call_cache": {"compiler", "replay", "explain", "runtime"},
    "standalone": {"call_cache", "compiler", "dynamo", "explain", "runtime"},
    "sequential": {"call_cache", "standalone", "compiler", "dynamo", "explain", "runtime"},
    "testing": {"compiler", "runtime", "sequential"},
}


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


def parts_of_fuser(path):
    """The packages and single files of fuser that a file imports."""
    return {modules(name)[1] for name in imports(path) if name.startswith("fuser.")}


@pytest.mark.parametrize("path", files("fuser"), ids=lambda p: str(p.relative_to(ROOT)))
def test_parts_of_fuser_import_only_what_is_below_them(path):
    part = path.relative_to(ROOT / "fuser").with_suffix("").parts[0]
    allowed = CONTRACT | ARROWS.get(part, set()) | {part}

    assert part == "__init__" or parts_of_fuser(path) <= allowed


def test_every_arrow_points_to_an_earlier_row():
    rows = list(ARROWS)
    assert all(rows.index(target) < rows.index(part) for part, targets in ARROWS.items() for target in targets)


def test_no_files_import_each_other():
    """Imports inside functions count."""
    paths = files("fuser", "ops", "integrations")
    name_of = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    graph = {name: {".".join(modules(i)) for i in imports(path) if i != "ops._C"} for path, name in name_of.items()}

    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the files


@pytest.mark.parametrize("path", files("ops"), ids=lambda p: p.name)
def test_ops_import_no_integration(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "integrations"]


def inside_kernels(path):
    """The modules behind the door that a file imports, but for values that all may share."""
    deep = [name for name in imports(path) if name.startswith("ops.kernels.") and len(modules(name)) > 2]
    return [name for name in deep if not name.startswith(SHARED)]


def modules(name):
    """The part of a dotted name that is a module."""
    parts = name.split(".")
    return parts if is_module(parts) else parts[:-1]


def is_module(parts):
    path = ROOT.joinpath(*parts)
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.mark.parametrize("name", DOORS)
def test_a_door_imports_kernels(name):
    assert inside_kernels(ROOT / "ops" / name)


OUTSIDE = [
    path
    for path in files("ops", "integrations")
    if "kernels" not in path.parts and path.relative_to(ROOT / path.relative_to(ROOT).parts[0]).as_posix() not in DOORS
]


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: p.name)
def test_the_rest_sees_kernels_through_their_door(path):
    assert inside_kernels(path) == []


@pytest.mark.parametrize("path", files("fuser", "ops", "integrations"), ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_relatively(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "fusible"]


INSIDE = files("ops/kernels")


@pytest.mark.parametrize("path", INSIDE, ids=lambda p: str(p.relative_to(ROOT / "ops/kernels")))
def test_kernels_import_no_op(path):
    allowed = ("ops.kernels", "ops.activation_spec", "ops.grouped_tensor", "ops.programs", "ops._C")

    assert all(name.startswith(allowed) for name in imports(path) if name.startswith("ops."))
