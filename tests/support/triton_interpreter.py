"""Our Triton kernels in Triton's interpreter, on tensors of the CPU; ``conftest.py`` turns it on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@contextmanager
def interpreted() -> Iterator[Any]:
    """In the body, kernels run on the CPU; gives their ``launch``."""
    if find_spec("triton") is None or torch.cuda.is_available():
        pytest.skip("needs Triton, and no GPU")
    with pytest.MonkeyPatch.context() as patch:
        interpreter = import_module("triton.runtime.interpreter")
        of_triton = interpreter._patch_lang_tensor
        patch.setattr(interpreter, "_patch_lang_tensor", lambda *arguments: _patch_tensor(of_triton, *arguments))
        yield import_module("fusible.ops.kernels.triton.device.launch")


def _patch_tensor(of_triton: Any, tensor: Any, scope: Any) -> None:
    """From NumPy 2.4 on, an array of one element is no integer, and Triton's own ``__index__`` fails."""
    of_triton(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
