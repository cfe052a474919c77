"""Lets other libraries be imported that import, at their top, what is not installed here and the tests do not run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from unittest.mock import MagicMock

from torch.utils._triton import has_triton_package


@contextmanager
def triton_if_missing() -> Iterator[None]:
    """For the body, whose imports see a triton that computes nothing: its decorators make functions of no use."""
    if find_spec("triton") is not None:
        yield
        return
    _let_torch_see_that_it_is_missing()
    names = "triton", "triton.language"
    sys.modules.update({name: _module(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _let_torch_see_that_it_is_missing() -> None:
    """Torch asks once and keeps the answer; its compiler asks where it is imported."""
    assert not has_triton_package()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about torch
        import torch._inductor.compile_fx  # noqa: F401


def _module(name: str) -> MagicMock:
    return MagicMock(name=name, __spec__=ModuleSpec(name, None), __path__=[], __version__="0")
