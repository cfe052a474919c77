"""The report of `info` on the installation: its folder, and why it has no kernels."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import fusible
from fusible import installation
from fusible.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(installation, "find_spec", lambda name: None if name.endswith("_C") else found(name))


@pytest.mark.usefixtures("without_extension")
@pytest.mark.parametrize("reason", ["FUSIBLE_BUILD_CUDA=0", "no nvcc in PATH"])
def test_the_reason_is_the_one_of_the_build(tmp_path: Path, reason: str) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / installation.NOTE).write_text(reason + "\n")

    assert installation.missing_kernels(tmp_path) == f"not built ({reason})"


@pytest.mark.usefixtures("without_extension")
def test_no_reason_is_guessed(tmp_path: Path) -> None:
    assert installation.missing_kernels(tmp_path) == "not built (nothing was built for this folder)"


def test_an_extension_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "fusible.ops._C", None)
    monkeypatch.delattr(fusible.ops, "_C", raising=False)

    assert str(installation.missing_kernels()).startswith("built, but does not load (")


def test_info_says_where_it_was_imported_from(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info"])
    printed = capsys.readouterr().out

    assert f"from {Path(fusible.__file__).parent}\n" in printed
    assert f"kernels   {installation.kernels()}\n" in printed


def test_setup_and_info_agree_on_the_file() -> None:
    assert f'NOTE = "{installation.NOTE.name}"' in (ROOT / "setup.py").read_text()


def test_the_command_line_needs_torch_and_networkx_only() -> None:
    """`make demo` installs no more."""
    code = """
import sys
sys.path.insert(0, "src")
for name in ("numpy", "matplotlib", "transformers", "pytest", "setuptools"):
    sys.modules[name] = None
import fusible.__main__
fusible.__main__.main(["demo", "--steps", "1", "--rounds", "1"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "RoutedMLP" in done.stdout


def test_reading_a_function_imports_no_compiler() -> None:
    code = "import fusible, sys, torch; {}; print('torch._dynamo' in sys.modules)"
    printed = [
        subprocess.run([sys.executable, "-c", code.format(read)], capture_output=True, text=True, check=True).stdout
        for read in ("fusible.Pointwise(lambda x: torch.relu(x) ** 2)", "pass")
    ]
    assert printed[0] == printed[1]
