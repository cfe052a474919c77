"""The script that describes the structure of the tree: what it finds here, and in a tree that breaks the rules."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fusible.benchmarks import call_counts, structure
from fusible.benchmarks.call_counts import Counts

SHARED_NAMES = {
    "Saved": "what a `fwd` leaves for its `bwd`: part of the contract of an op, and private to each",
    "Layout": "fusible.jax numbers the layouts as the extension does, and imports no torch",
    "ArgumentError": "fusible.jax has the errors of fusible, and imports no torch",
    "RefusedError": "as ArgumentError",
    "Config": "torchtitan asks for the class of this name inside of its experts",
    "GroupedLinear": "Megatron-Core asks for the op by the name that TransformerEngine has given it",
    "ScaledSwiGLU": "as GroupedLinear",
    "Sequential": "as GroupedLinear",
}
"""Types of the package that share their name with another one, and why."""


LARGEST = {  # what must not grow unnoticed
    "files flat in ops": 12,
    "files flat in ops/kernels": 12,
    "files flat in integrations": 12,
    "files flat in tests": 12,
    "arrows between rooms of fuser": 30,
    "arrows between rooms of ops": 60,
    "arrows between rooms of ops.kernels": 43,
    "arrows with a way back in fuser": 0,
    "arrows with a way back in ops": 0,
    "arrows with a way back in ops.kernels": 0,
    "functions with 10 parameters or more": 7,
    "`Any`": 600,
}


@pytest.fixture
def entangled(tmp_path: Path) -> Path:
    """A tree whose package ops has two files that import each other, one of them inside a function."""
    sources = {
        "fuser/__init__.py": "",
        "integrations/__init__.py": "from fusible.ops import glu\n",
        "ops/__init__.py": "from .glu import GLU\n",
        "ops/glu.py": "from .kernels import door\n",
        "ops/kernels/__init__.py": "from ... import _C\nfrom ..checks import check\n",
        "ops/kernels/door.py": "from .. import _C\n",
        "ops/checks.py": "def check():\n    from .glu import GLU\n",
    }
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def numbers(table: str) -> dict[str, list[int]]:
    """The cells of a table in Markdown that are numbers, by row."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: [int(cell) for cell in cells if cell.isdigit()] for name, *cells in rows}


def test_nothing_here_imports_in_a_circle() -> None:
    imports = structure.Imports.of(structure.ROOT)

    assert structure.cycles(imports.files) == []
    assert structure.cycles(imports.boxes) == []


def test_a_cycle_is_found(entangled: Path) -> None:
    imports = structure.Imports.of(entangled)

    assert structure.cycles(imports.files) == []
    assert structure.cycles(imports.boxes) == [{"ops.glu", "ops.kernels", "ops.checks"}]


def test_imports_are_edges(entangled: Path) -> None:
    imports = structure.Imports.of(entangled)

    assert set(imports.files.edges) == {
        ("integrations", "ops.glu"),
        ("ops", "ops.glu"),
        ("ops.glu", "ops.kernels.door"),
        ("ops.kernels", "ops.checks"),
        ("ops.checks", "ops.glu"),
    }


def test_the_tree_keeps_its_size() -> None:
    sizes = structure.sizes(structure.ROOT)

    assert {name: sizes[name] for name, most in LARGEST.items() if sizes[name] > most} == {}


def test_rooms_are_files_and_subpackages(entangled: Path) -> None:
    files = structure.Imports.of(entangled).files
    graph = structure.rooms(files, "ops")

    assert set(graph) == {"ops", "ops.glu", "ops.kernels", "ops.checks"}
    assert (graph.number_of_edges(), structure.arrows_in_circles(graph)) == (4, 3)
    assert set(structure.rooms(files, "ops.kernels")) == {"ops.kernels", "ops.kernels.door"}


def test_parameters_are_counted_without_self(tmp_path: Path) -> None:
    nine = ", ".join("abcdefghi")
    file = tmp_path / "wide.py"
    file.write_text(f"def few({nine}, *rest, **others): ...\nclass C:\n    def many(self, {nine}, *, j): ...\n")

    assert structure.wide_functions([file]) == 1


def test_layers_have_the_deepest_below(entangled: Path) -> None:
    imports = structure.Imports.of(entangled)

    assert structure.layers(imports.files) == [
        ["fuser", "ops.kernels.door"],
        ["ops.glu"],
        ["integrations", "ops", "ops.checks"],
        ["ops.kernels"],
    ]


def test_a_hop_is_a_call_in_another_file_than_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_counts, "is_ours", lambda name: name in ("a", "b"))
    functions: dict[str, Any] = {}
    for file, name in (("a", "one"), ("a", "two"), ("b", "three")):
        exec(compile(f"def {name}(*arguments): ...", file, "exec"), functions)
    one, two, three = (functions[name] for name in ("one", "two", "three"))

    assert Counts.of(lambda: three(two(one()), len("abc"))) == Counts(functions=3, files=2, hops=1)
    assert Counts.of(lambda: one(three(two()))) == Counts(functions=3, files=2, hops=2)


def test_it_prints_calls_imports_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    structure.main([])
    calls, imports, layers, lines, sizes = capsys.readouterr().out.strip().split("\n\n")
    functions = {name: row[0] for name, row in numbers(calls).items()}
    boxes = numbers(imports)["fuser"][2]

    assert all(files <= hops + 1 <= functions for functions, files, hops in numbers(calls).values())
    assert functions["GPU path, 3rd, replayed, forward"] < 45 < functions["CPU, hot forward"]
    assert functions["CPU, hot forward"] < functions["CPU, cold forward"]
    assert len(re.findall(r"- fuser, layer .*", layers)) == numbers(imports)["fuser"][4]
    assert boxes == sum(line.count(",") for line in layers.splitlines() if line.startswith("- fuser"))
    assert all(lines > 0 for _, lines in numbers(lines).values())
    assert numbers(sizes)["rooms of ops"][0] > 1


def test_it_describes_another_tree(entangled: Path) -> None:
    assert "one of 3" in structure.table_of_imports(entangled)
    assert numbers(structure.table_of_lines(entangled))["ops"] == [5, 7]


def test_it_counts_the_calls_of_another_tree(tmp_path: Path) -> None:
    for package in (*structure.PACKAGES, "src", "benchmarks", "examples"):
        (tmp_path / package).symlink_to(structure.ROOT / package)

    assert set(structure.count_calls(tmp_path)) == {"CPU, cold forward", "CPU, hot forward", "CPU, hot backward"}


def type_names(node: ast.AST) -> list[str]:
    """The type names that a node defines: a class, or at the top of a file an alias such as ``Row =
    tuple[str, ...]``.
    """
    match node:
        case ast.ClassDef(name=name):
            return [name]
        case ast.Module(body=body):
            targets = [target for each in body if isinstance(each, ast.Assign) for target in each.targets]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            return [name for name in names if re.match(r"_?[A-Z][a-z]", name)]
    return []


def types(root: Path) -> dict[str, list[str]]:
    """Where each type of the package is defined, private ones included. Of benchmarks these are classes alone."""
    found = defaultdict(list)
    for package in (*structure.PACKAGES, "src/fusible", "benchmarks"):
        for path in sorted((root / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            nodes = [node for node in ast.walk(tree) if node is not tree or package != "benchmarks"]
            for name in [name for node in nodes for name in type_names(node)]:
                found[name].append(str(path.relative_to(root)))
    return found


def test_no_two_types_have_one_name() -> None:
    shared = {name: where for name, where in types(structure.ROOT).items() if len(where) > 1}

    assert {name: where for name, where in shared.items() if name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) == set(shared)
