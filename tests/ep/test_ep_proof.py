"""The command that proves everything where there are several GPUs: it runs here too, on CPUs, in a small extent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import ep_gpu_cases
import ep_proof
import ep_world
import pytest

RULES = {case.__name__ for case in ep_gpu_cases.CASES if case not in ep_gpu_cases.NEED_GPUS} - {*ep_proof.LONG}


def run(out: Path) -> subprocess.CompletedProcess[str]:
    """The command on CPUs."""
    command = [sys.executable, ep_proof.__file__, "--device", "cpu", "--transport", "collective", "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, env=ep_world.environment("cpu"))


def test_all_parts_pass_on_two_processes(tmp_path: Path) -> None:
    done = run(tmp_path)
    lines = re.findall(r"s  2 ranks  (.*)", done.stdout)

    assert set(lines[:-3]) == {f"{name}: passed" for name in RULES}, done.stdout + done.stderr
    assert lines[-3:] == [f"{name}: passed" for name in (*ep_proof.LONG, "times")], done.stdout
    assert done.returncode == 0
    assert json.loads((tmp_path / "2 ranks" / "times.json").read_text())
    assert set(json.loads((tmp_path / "2 ranks" / "training" / "1.json").read_text())) == set(ep_proof.LONG[1:])


def test_what_goes_wrong_is_printed_and_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"a": ["", "rank 1: y differs"], "b": ["", ""]}
    monkeypatch.setattr(ep_proof, "parts_of_cases", lambda run: iter([("rules", ("a", "b", "c"), 1.0)]))
    monkeypatch.setattr(ep_proof, "start", lambda *_: said)
    monkeypatch.setattr(ep_proof, "measurements", lambda run: iter([("times", "--preset none", 100.0)]))
    with pytest.raises(SystemExit, match="1"):
        ep_proof.main(["--device", "cpu", "--out", str(tmp_path)])
    printed = capsys.readouterr().out

    assert "2 ranks  a: rank 1: y differs" in printed
    assert "2 ranks  b: passed" in printed
    assert "2 ranks  c: 0 of 2 ranks came to it" in printed
    assert "2 ranks  times: Command" in printed
