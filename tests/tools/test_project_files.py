"""The project's files agree: one version, one licence, and workflows that call what runs here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import fusible

ROOT = Path(__file__).resolve().parents[2]
LICENCE = "Apache-2.0"
SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())


def read(name: str) -> str:
    return (ROOT / name).read_text()


def field_of_citation(name: str) -> str:
    found = re.search(rf"^{name}: (.+)$", read("CITATION.cff"), re.MULTILINE)
    assert found is not None, f"CITATION.cff has no {name}"
    return found[1]


def newest_release() -> tuple[str, str]:
    """Version and date of the first release in the changelog."""
    found = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)
    assert found is not None, "CHANGELOG.md has no release"
    return found[1], found[2]


def test_versions_are_equal() -> None:
    assert newest_release() == (fusible.__version__, field_of_citation("date-released"))
    assert field_of_citation("version") == fusible.__version__


def test_changelog_has_the_sections_of_its_form() -> None:
    headings = re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.MULTILINE)

    assert "## [Unreleased]" in read("CHANGELOG.md")
    assert set(headings) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_licence_is_named_alike_everywhere() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]

    assert project["license"] == LICENCE
    assert project["license-files"] == ["LICENSE"]
    assert field_of_citation("license") == LICENCE
    assert re.match(r"\s+Apache License\s+Version 2\.0, January 2004\s", read("LICENSE"))
    assert "END OF TERMS AND CONDITIONS" in read("LICENSE")


OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS", "JOBS")  # what make tells the make that it calls


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_demo_installs_what_torch_would_warn_of(tmp_path: Path) -> None:
    """Torch prints a warning at the first optimizer where numpy is missing."""
    command = ["make", "-n", "demo", f"VENV={tmp_path / 'venv'}"]
    alone = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    steps = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    *before, demo = steps.strip().splitlines()

    assert demo.endswith("-m fusible demo")
    assert any(re.search(r"pip .*install -q numpy$", line) for line in before)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sources_of_the_extension_name_their_licence(path: Path) -> None:
    assert path.read_text().startswith(f"// SPDX-License-Identifier: {LICENCE}\n")


def test_authors_are_named_alike() -> None:
    (author,) = tomllib.loads(read("pyproject.toml"))["project"]["authors"]

    assert f"name: {author['name']}\n" in read("CITATION.cff")


def test_the_public_ci_runs_what_runs_here() -> None:
    assert re.search(r"run: \.ci/run$", read(".github/workflows/ci.yml"), re.MULTILINE)
    assert (ROOT / ".ci" / "run").is_file()


def test_the_wheel_job_runs_the_one_command() -> None:
    assert re.search(r"run: make wheels$", read(".github/workflows/wheels.yml"), re.MULTILINE)
    assert re.search(r"^wheels:.*\n\t\.ci/wheels$", read("Makefile"), re.MULTILINE)


def test_wheels_are_built_for_every_python_that_is_promised() -> None:
    promised = re.findall(r"Python :: (3\.\d+)", read("pyproject.toml"))
    built = re.search(r"PYTHONS:-([\d. ]+)\}", read(".ci/wheels"))

    assert built is not None
    assert built[1].split() == promised


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_project_pages_lead_somewhere(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", read(page)) if "://" not in link]

    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_of_contributors_exist() -> None:
    targets = re.findall(r"^ +make ([a-z -]+?)(?: +ARGS.*)?(?: +#.*)?$", read("CONTRIBUTING.md"), re.MULTILINE)

    assert targets
    for target in " ".join(targets).split():
        assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE), target


def test_hooks_and_templates_name_commands_that_exist() -> None:
    hooks = re.findall(r"entry: make (\w+)$", read(".pre-commit-config.yaml"), re.MULTILINE)
    template = re.search(r"`make ([a-z ]+)` passes", read(".github/pull_request_template.md"))

    assert hooks == ["lint", "types"]
    assert template is not None
    for target in {*hooks, *template[1].split()}:
        assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE), target


def test_what_is_left_out_exists() -> None:
    names = re.findall(r'^    "(test_\w+)": ["\d]', read("tests/conftest.py"), re.MULTILINE)

    assert len(names) > 10
    assert set(names) - {path.stem for path in (ROOT / "tests").rglob("test_*.py")} == set()
