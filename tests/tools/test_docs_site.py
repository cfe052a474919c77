"""The site of the documentation: its pages are all there, its reference has every public name, its tables every op."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import fusible
from fusible.fuser import registry

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MODULES = {"__version__", "integrations"}  # are public, but no object to document
NO_OPS = {"Composite", "FusedOp", "Op"}  # to derive from


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

    assert sorted(listed) == [page for page in pages if not page.startswith("lab/")]  # the lab book has its own index


def test_every_public_name_has_one_entry_in_the_reference() -> None:
    pages = "\n".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
    entries = Counter(re.findall(r"^::: fusible\.(\w+)$", pages, re.MULTILINE))

    assert entries == Counter(set(fusible.__all__) - MODULES)


def test_the_index_of_names_and_the_reference_name_the_same() -> None:
    table = (DOCS / "api" / "index.md").read_text().split("\n\n")[2]

    assert {*re.findall(r"`(\w+)`", table)} - {"fusible"} == set(fusible.__all__) - MODULES


def by_op() -> dict[str, set[str]]:
    """The ops of the table, and the fusions that take them."""
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", (DOCS / "support.md").read_text().split("## By op")[1], re.MULTILINE)
    return {op: {*re.findall(r"`(\w+)`", taken)} for ops, taken in rows for op in re.findall(r"`(\w+)`", ops)}


def test_every_op_is_in_the_table() -> None:
    public = {name: getattr(fusible, name) for name in fusible.__all__}
    ops = {n for n, o in public.items() if isinstance(o, type) and issubclass(o, fusible.Op | fusible.Composite)}
    fused = {n for n in ops if issubclass(public[n], fusible.FusedOp)}

    assert {*by_op()} == ops - fused - NO_OPS


@pytest.mark.parametrize("fusion", [f.name for f in registry])
def test_the_table_names_the_fusions_that_take_an_op(fusion: str) -> None:
    (found,) = (f for f in registry if f.name == fusion)
    roles, runs = found.pattern.roles, found.pattern.runs
    kinds = [kind or runs[role].types for role, kind in roles.items()]  # of a role that is a run alone, the types in it
    taking = {op for op in by_op() if any(issubclass(getattr(fusible, op), kind) for kind in kinds)}

    assert {op for op, fusions in by_op().items() if fusion in fusions} == taking
