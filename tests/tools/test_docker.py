"""The Dockerfile: what it names exists, and its versions are those that are tested. Nothing is built here."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Each with its arguments, lines that go on joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    return [(name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)]


def arguments() -> dict[str, str]:
    """The arguments of a build, with their defaults."""
    return dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG")


def context() -> set[str]:
    """The files of the root that are sent to a build."""
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in lines
    return {line[1:] for line in lines if line.startswith("!")}


def test_every_instruction_and_argument_is_known() -> None:
    read = {name for _, rest in instructions() for name in re.findall(r"\$\{(\w+)\}", rest)}

    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    assert read - {"PATH"} == set(arguments())
    assert [json.loads(rest) for name, rest in instructions() if name in ("ENTRYPOINT", "CMD")] == [
        ["fusible"],
        ["info"],
    ]


def test_stages_that_are_read_come_before() -> None:
    stages: set[str] = set()
    for name, rest in instructions():
        assert set(re.findall(r"from=(\w+)", rest)) <= stages
        if name == "FROM":
            stages |= set(re.findall(r" AS (\w+)", rest))
    assert stages == {"wheel"}


def test_versions_are_those_that_ran_on_a_gpu() -> None:
    """CUDA versions have all their numbers; an index of PyTorch has two of them."""
    support = (ROOT / "docs" / "support.md").read_text()
    tested = re.search(r"PyTorch ([\d.]+) with CUDA ([\d.]+) and Python ([\d.]+) on an H200", support)
    assert tested is not None
    torch, cuda, python = tested.groups()

    assert arguments()["TORCH"] == torch
    assert arguments()["CUDA"].startswith(f"{cuda}.")
    assert arguments()["TORCH_INDEX"].endswith(f"/cu{cuda.replace('.', '')}")
    assert {"24.04": "3.12"}[arguments()["UBUNTU"]] == python  # python3 of that release


def test_context_has_all_that_a_wheel_is_built_from() -> None:
    links = {path.resolve().relative_to(ROOT).parts[0] for path in (ROOT / "src" / "fusible").iterdir()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    grafted = set(re.findall(r"^graft (\w+)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE))

    assert context() >= links | grafted | {project["readme"], *project["license-files"]}
    assert context() >= {"setup.py", "pyproject.toml", "MANIFEST.in"}
    assert all((ROOT / name).exists() for name in context())


def test_the_command_is_the_one_that_is_installed() -> None:
    assert "fusible" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
