"""The structure of the tree in numbers: functions that a call runs, imports between parts, lines, sizes.

``python -m fusible.benchmarks.structure`` prints Markdown. ``--tree PATH`` measures another checkout, such as an older
one.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import networkx as nx

from . import call_counts
from .call_counts import Counts
from .timing import markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fuser", "ops", "integrations")
EXTENSION = "ops._C"
ROOMY = ("fuser", "ops", "ops.kernels")  # packages whose files and subpackages are rooms
FLAT = ("ops", "ops/kernels", "integrations", "tests")
MANY_PARAMETERS = 10
PYTHON = (*PACKAGES, "src/fusible", "benchmarks", "examples", "tests")


def python_files(tree: Path, folder: str) -> list[Path]:
    """The Python files of a folder. Links are not followed, so every file counts once."""
    return [path for path in sorted((tree / folder).rglob("*.py")) if not path.parent.is_symlink()]


# ---- imports


class Imports(NamedTuple):
    """The import graph, including imports inside functions and for types."""

    files: nx.DiGraph[str]
    boxes: nx.DiGraph[str]  # a file, or a subpackage with all that is in it

    @classmethod
    def of(cls, tree: Path, packages: Sequence[str] = PACKAGES) -> Imports:
        """The imports among the files of these packages."""
        paths = {module_name(path.relative_to(tree)): path for p in packages for path in python_files(tree, p)}
        files: nx.DiGraph[str] = nx.DiGraph()
        files.add_nodes_from(paths)
        for name, path in paths.items():
            targets = {target for imported in imported_names(path, tree) if (target := module_in(imported, paths))}
            files.add_edges_from((name, target) for target in targets - {name})
        boxes: nx.DiGraph[str] = nx.DiGraph()
        subpackages = {".".join(name.split(".")[:2]) for name in paths if name.count(".") > 1}
        boxes.add_nodes_from(box_of(name, subpackages) for name in files)
        pairs = ((box_of(a, subpackages), box_of(b, subpackages)) for a, b in files.edges)
        boxes.add_edges_from((a, b) for a, b in pairs if a != b)
        return cls(files, boxes)


def module_name(path: Path) -> str:
    """ "fuser.contract.op" for fuser/contract/op.py, "fuser" for its __init__.py."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported_names(path: Path, tree: Path) -> Iterator[str]:
    """The dotted names that a file imports: relative ones resolved, "fusible." removed."""
    package = path.relative_to(tree).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])]).removeprefix("fusible.")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("fusible.") for alias in node.names)


def module_in(name: str, modules: Iterable[str]) -> str | None:
    """The module that an imported name is or belongs to; None for the compiled extension, which has no file here."""
    return next((m for m in (name, name.rpartition(".")[0]) if m in modules and name != EXTENSION), None)


def box_of(name: str, subpackages: set[str]) -> str:
    head = ".".join(name.split(".")[:2])
    return head if head in subpackages else name


def cycles(graph: nx.DiGraph[str]) -> list[set[str]]:
    """The strongly connected sets of nodes, the largest first."""
    components = [part for part in nx.strongly_connected_components(graph) if len(part) > 1]
    return sorted(components, key=len, reverse=True)


def layers(graph: nx.DiGraph[str]) -> list[list[str]]:
    """The nodes by the length of their longest path down; the nodes of a cycle share a layer."""
    condensed = nx.condensation(graph)
    height: dict[int, int] = {}
    for part in reversed(list(nx.topological_sort(condensed))):
        height[part] = 1 + max((height[below] for below in condensed.successors(part)), default=-1)
    rows: list[list[str]] = [[] for _ in range(1 + max(height.values(), default=-1))]
    for part, row in height.items():
        rows[row] += condensed.nodes[part]["members"]
    return [sorted(row) for row in rows]


def rooms(files: nx.DiGraph[str], package: str) -> nx.DiGraph[str]:
    """The imports among the rooms of a package; a room is a file in it or a subpackage."""
    depth = package.count(".") + 2
    inside = [name for name in files if f"{name}.".startswith(f"{package}.")]
    part_of = {name: ".".join(name.split(".")[:depth]) for name in inside}
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(part_of.values())
    pairs = ((part_of[a], part_of[b]) for a, b in files.subgraph(inside).edges)
    graph.add_edges_from((a, b) for a, b in pairs if a != b)
    return graph


def arrows_in_circles(graph: nx.DiGraph[str]) -> int:
    """The number of edges that are part of a cycle."""
    return sum(graph.subgraph(part).number_of_edges() for part in cycles(graph))


def describe_cycles(graph: nx.DiGraph[str]) -> str:
    return ", ".join(f"one of {len(part)}" for part in cycles(graph)) or "none"


# ---- lines


class Lines(NamedTuple):
    files: int
    lines: int

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Lines:
        counts = [len(path.read_text().splitlines()) for path in paths]
        return cls(len(counts), sum(counts))


def lines_by_package(tree: Path) -> dict[str, Lines]:
    """Lines of Python by package, and of the CUDA sources with their headers."""
    csrc = sorted(path for path in (tree / "csrc").rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h"))
    return {**{p: Lines.of(python_files(tree, p)) for p in PYTHON}, "csrc": Lines.of(csrc)}


# ---- sizes


def library(tree: Path) -> list[Path]:
    return [path for package in (*PACKAGES, "src/fusible") for path in python_files(tree, package)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters of a function, without self, ``*args`` and ``**kwargs``."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def wide_functions(paths: Iterable[Path]) -> int:
    """The number of functions with many parameters."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(parameters(function) >= MANY_PARAMETERS for function in functions)


def sizes(tree: Path) -> dict[str, int]:
    """The sizes that should not grow, by name."""
    paths, files = library(tree), Imports.of(tree).files
    lines = lines_by_package(tree)
    graphs = {package: rooms(files, package) for package in ROOMY}
    return {
        "library Python, lines": Lines.of(paths).lines,
        "csrc, lines": lines["csrc"].lines,
        **{f"files flat in {folder}": len([*(tree / folder).glob("*.py")]) for folder in FLAT},
        **{f"rooms of {name}": len(graph) for name, graph in graphs.items()},
        **{f"arrows between rooms of {name}": graph.number_of_edges() for name, graph in graphs.items()},
        **{f"arrows with a way back in {name}": arrows_in_circles(graph) for name, graph in graphs.items()},
        f"functions with {MANY_PARAMETERS} parameters or more": wide_functions(paths),
        "`Any`": sum(len(re.findall(r"\bAny\b", path.read_text())) for path in paths),
    }


# ---- tables


def count_calls(tree: Path) -> dict[str, Counts]:
    """Counts calls: in this tree on a CPU and with the stub; in another tree on a CPU alone, by a process that imports
    it.
    """
    if tree == ROOT:
        return {**call_counts.on_cpu(), **call_counts.with_stub()}
    source = tree / "src" if (tree / "src").is_dir() else tree  # where the import package stands
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-P", str(call_counts.__file__)]
    printed = subprocess.run(command, env=environment, cwd=tree, check=True, capture_output=True, text=True).stdout
    return {name: Counts(*counts) for name, counts in json.loads(printed).items()}


def table_of_calls(tree: Path) -> str:
    rows = [(name, *map(str, counts)) for name, counts in count_calls(tree).items()]
    return markdown(("call", "functions", "files", "hops"), rows)


def table_of_imports(tree: Path) -> str:
    rows = []
    for packages in (*((p,) for p in PACKAGES), PACKAGES):
        files, boxes = Imports.of(tree, packages)
        sizes = len(files), files.number_of_edges(), describe_cycles(files)
        shape = len(boxes), boxes.number_of_edges(), len(layers(boxes)), describe_cycles(boxes)
        rows.append((" + ".join(packages), *map(str, sizes), *map(str, shape)))
    columns = "files", "imports", "cycles of files", "boxes", "arrows", "layers", "cycles of boxes"
    return markdown(("package", *columns), rows)


def list_of_layers(tree: Path) -> str:
    """The boxes of each package, the lowest layer first."""
    lines = []
    for package in PACKAGES:
        rows = layers(Imports.of(tree, (package,)).boxes)
        names = [", ".join(name.removeprefix(f"{package}.") for name in row) for row in rows]
        lines += [f"- {package}, layer {i}: {row}" for i, row in enumerate(names)]
    return "\n".join(lines)


def table_of_lines(tree: Path) -> str:
    counts = lines_by_package(tree)
    return markdown(("lines", "files", "lines"), [(name, *map(str, lines)) for name, lines in counts.items()])


def table_of_sizes(tree: Path) -> str:
    return markdown(("size", "number"), [(name, str(number)) for name, number in sizes(tree).items()])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints calls, imports, layers, lines and sizes as Markdown."""
    parser = argparse.ArgumentParser(prog="structure", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the root of a checkout; this one by default")
    tree = parser.parse_args(argv).tree.resolve()
    for section in (table_of_calls, table_of_imports, list_of_layers, table_of_lines, table_of_sizes):
        print(section(tree) + "\n")


if __name__ == "__main__":
    main()
