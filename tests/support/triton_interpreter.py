"""Our Triton kernels in Triton's interpreter, on tensors of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

PACKAGE = "fusible.ops.kernels.triton.device"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@contextmanager
def interpreted() -> Iterator[Any]:
    """In the body, kernels run on the CPU; gives their ``launch``. What has been loaded of them is loaded anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        _forget_kernels()
        interpreter = import_module("triton.runtime.interpreter")
        of_triton = interpreter._patch_lang_tensor
        patch.setattr(interpreter, "_patch_lang_tensor", lambda *arguments: _patch_tensor(of_triton, *arguments))
        yield import_module(f"{PACKAGE}.launch")
        _forget_kernels()


def _patch_tensor(of_triton: Any, tensor: Any, scope: Any) -> None:
    """From NumPy 2.4 on, an array of one element is no integer, and Triton's own ``__index__`` fails."""
    of_triton(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _forget_kernels() -> None:
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]
    vars(import_module(PACKAGE.rpartition(".")[0])).pop("device", None)
