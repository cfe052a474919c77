"""Integrations that are imported as soon as their framework is."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from fusible.integrations.on_import import after_import

FRAMEWORK, INTEGRATION = "a_framework.models", "an_integration"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A framework, and an integration that needs what the framework defines last."""
    (tmp_path / "a_framework").mkdir()
    (tmp_path / "a_framework" / "__init__.py").write_text("")
    (tmp_path / "a_framework" / "models.py").write_text("def model(): ...\nregistered = []\n")
    (tmp_path / "an_integration.py").write_text(
        "from a_framework.models import registered\nregistered.append(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in (FRAMEWORK, "a_framework", INTEGRATION):
        sys.modules.pop(name, None)


def test_the_framework_comes_later(tree: Path) -> None:
    finders = list(sys.meta_path)
    after_import(FRAMEWORK, INTEGRATION)
    assert not {"a_framework", INTEGRATION} & sys.modules.keys()
    importlib.import_module("a_framework")
    assert INTEGRATION not in sys.modules
    framework = importlib.import_module(FRAMEWORK)

    assert framework.registered == [INTEGRATION]
    assert sys.meta_path == finders
    assert "exec_module" not in vars(framework.__loader__)
    assert inspect.getsource(framework.model) == "def model(): ...\n"


def test_the_framework_is_there(tree: Path) -> None:
    finders, framework = list(sys.meta_path), importlib.import_module(FRAMEWORK)
    after_import(FRAMEWORK, INTEGRATION)

    assert framework.registered == [INTEGRATION]
    assert sys.meta_path == finders


def test_a_framework_that_is_not_installed(tree: Path) -> None:
    after_import("a_framework.missing", INTEGRATION)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'a_framework\.missing'"):
        importlib.import_module("a_framework.missing")


def test_a_framework_that_fails(tree: Path) -> None:
    (tree / "a_framework" / "models.py").write_text("raise RuntimeError('of the framework')\n")
    after_import(FRAMEWORK, INTEGRATION)
    with pytest.raises(RuntimeError, match="of the framework"):
        importlib.import_module(FRAMEWORK)
    assert INTEGRATION not in sys.modules


def test_a_framework_that_is_too_old(tree: Path) -> None:
    """Whoever names the integration gets the error."""
    (tree / "an_integration.py").write_text("from a_framework.models import nothing_of_that_name\n")
    after_import(FRAMEWORK, INTEGRATION)
    importlib.import_module(FRAMEWORK)
    with pytest.raises(ImportError, match="nothing_of_that_name"):
        importlib.import_module(INTEGRATION)


def test_an_integration_that_fails_in_another_way(tree: Path) -> None:
    (tree / "an_integration.py").write_text("1 / 0\n")
    after_import(FRAMEWORK, INTEGRATION)
    with pytest.warns(UserWarning, match="an_integration cannot be used: ZeroDivisionError"):
        importlib.import_module(FRAMEWORK)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    "imports",
    ["import fusible, sys; assert 'transformers' not in sys.modules; import {0}", "import {0}; import fusible"],
    ids=["fusible first", "transformers first"],
)
def test_the_name_of_hugging_face(imports: str) -> None:
    program = (
        f"{imports.format('transformers.models.mixtral.modeling_mixtral')}\n"
        "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as experts\n"
        "from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS as fp8\n"
        "assert experts['fusible'].__module__ == fp8['fusible'].__module__ == 'fusible.integrations.transformers'\n"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True)
