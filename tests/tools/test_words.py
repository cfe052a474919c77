"""Docstrings, comments and error texts name their subject first, in plain English.

A sentence that begins with "Of", "What", "Those" or "Whose" leaves its noun to the reader's guess.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("fuser", "ops", "integrations", "src", "csrc", "benchmarks", "examples")
SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h"}
OPENERS = "Of|What|Those|That of|Whose|Whether of"
PRONOUNS = re.compile(r"\b(nobody|somebody)\b", re.IGNORECASE)
ITEM = re.compile(r"[\w`*][\w`*., ]*(\(.*\))?:( |$)")
SECTIONS = re.compile(r"^(?:Args|Attributes|Keyword Args|Raises):\n((?: {4}.*\n|\n)+)", re.MULTILINE)
BEGINNING = re.compile(rf"(?:\A\s*|[.!?]\s+|\n\s*\n\s*)(?:{OPENERS})\b[^.?]*(?P<end>[.?]|\Z)")


def objections(text: str) -> list[str]:
    """The parts of a text that break the rules; questions may begin with "What"."""
    begun = [match[0].strip() for match in BEGINNING.finditer(text) if match["end"] != "?"]
    return begun + PRONOUNS.findall(text)


def no_items(docstring: str) -> list[str]:
    """The lines of a docstring's sections that the site takes for items: continuations that are not indented."""
    lines = [line[4:] for section in SECTIONS.findall(f"{docstring}\n") for line in section.splitlines()]
    return [line for line in lines if line[:1].strip() and not ITEM.match(line)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, comment and string of a file."""
    yield from python_texts(path) if path.suffix == ".py" else csrc_comments(path.read_text())


def python_texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings and comments of a Python file; consecutive comment lines are one text."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    own = {number for number, token in lines.items() if not token.line[: token.start[1]].strip()}
    yield from joined({number: token.string.lstrip("#") for number, token in lines.items()}, own)


def csrc_comments(source: str) -> Iterator[tuple[int, str]]:
    """The comments of a C++ or CUDA file; consecutive comment lines are one text."""
    found = {n: re.search(r"(?<!:)//+(.*)$", line) for n, line in enumerate(source.splitlines(), 1)}
    comments = {n: match for n, match in found.items() if match and "SPDX" not in match[1]}
    own = {n for n, match in comments.items() if not match.string[: match.start()].strip()}
    yield from joined({n: match[1] for n, match in comments.items()}, own)


def joined(comments: dict[int, str], own: set[int]) -> Iterator[tuple[int, str]]:
    """Comments by their first line; those on lines of their own continue the line above."""
    blocks: list[tuple[int, list[str]]] = []
    for number, text in comments.items():
        if number in own and number - 1 in own and blocks:
            blocks[-1][1].append(text.strip())
        else:
            blocks.append((number, [text.strip()]))
    for number, parts in blocks:
        yield number, " ".join(parts)


def sources(folder: str) -> list[Path]:
    """A file itself, or the source files in a folder; links into other folders are not followed."""
    found = [ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*")
    return sorted(path for path in found if path.suffix in SUFFIXES and not path.is_symlink())


def objections_in(folder: str) -> dict[str, list[str]]:
    """The objections in a folder, by file and line."""
    return {
        f"{path.relative_to(ROOT)}:{line}": words
        for path in sources(folder)
        for line, text in texts(path)
        if (words := objections(text))
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_name_their_subject(folder: str) -> None:
    found = objections_in(folder)

    assert found == {}


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "csrc"])
def test_arguments_continue_indented(folder: str) -> None:
    nodes = [(path, node) for path in sources(folder) for node in ast.walk(ast.parse(path.read_text()))]
    docstrings = [(path, ast.get_docstring(node) or "") for path, node in nodes if isinstance(node, DOCUMENTED)]

    assert [(str(path), lines) for path, text in docstrings if (lines := no_items(text))] == []


def test_a_continuation_that_is_not_indented() -> None:
    text = "Does.\n\nArgs:\n    x: the rows, or\n    none.\n    y: the columns,\n        sorted."
    assert no_items(text) == ["none."]


@pytest.mark.parametrize(
    "text",
    [
        "Of the rows.",
        "What kernels compute of them.",
        "The sums. Those of a group.",
        "The bias.\n\n    Whose rows are sorted.",
        "That of a linear.",
        "Memory that nobody reads.",
    ],
)
def test_an_objection(text: str) -> None:
    assert objections(text)


@pytest.mark.parametrize(
    "text", ["The sums of a group, and those of its rows.", "What runs here? See below.", "Offset"]
)
def test_plain_words(text: str) -> None:
    assert objections(text) == []
