"""Output of a benchmark's findings: to the screen, and to Markdown and JSON files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fusible
from fusible import installation

from .problem import Problem


class Report:
    """Sections of Markdown, each with the same findings as data.

    Args:
        prefix: the prefix of the files ``.md`` and ``.json``; None: print only. They are rewritten with every section,
            so an interrupted run keeps its findings.
        as_json: print the data at the end instead of the sections.
    """

    def __init__(self, prefix: Path | None, as_json: bool = False) -> None:
        self._prefix, self._as_json = prefix, as_json
        self._sections: list[str] = []
        self._results: list[Mapping[str, Any]] = []
        self._about = about()

    def add(self, section: str, results: Iterable[Mapping[str, Any]]) -> None:
        """Prints a section, and rewrites the files."""
        self._sections.append(section)
        self._results += results
        self._write(self._sections, self._results)
        self.say(section + "\n")

    def draft(self, section: str, results: Iterable[Mapping[str, Any]]) -> None:
        """Rewrites the files, with a section that is not complete and that the next one replaces."""
        self._write([*self._sections, section], [*self._results, *results])

    def _write(self, sections: Sequence[str], results: Sequence[Mapping[str, Any]]) -> None:
        if self._prefix is not None:
            Path(f"{self._prefix}.md").write_text("\n\n".join(sections) + "\n")
            Path(f"{self._prefix}.json").write_text(_text({**self._about, "results": results}) + "\n")

    def say(self, text: str) -> None:
        """Prints a line, unless the output is JSON."""
        if not self._as_json:
            print(text, flush=True)

    @property
    def data(self) -> dict[str, Any]:
        """The findings so far."""
        return {**self._about, "results": self._results}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self._as_json:
            print(_text(self.data))


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1)


def about() -> dict[str, Any]:
    """The date, the machine and the versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": sys.argv[1:],
        "fusible": fusible.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu_threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of the checkout that runs, with ``-dirty`` if files differ; None outside a checkout."""
    command = ["git", "-C", str(installation.FOLDER), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def describe(problem: Problem) -> str:
    """The problem and the device, in one line."""
    groups, columns, features = problem.w1.shape
    sizes = f"E={groups}, K={features}, F={columns // 2}, T={problem.x.shape[0]}"
    where = torch.cuda.get_device_name() if problem.x.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    return f"{sizes}, {str(problem.x.dtype).removeprefix('torch.')}, {where}, torch {torch.__version__}"
