"""The first launch of a Triton kernel inside a CUDA graph is an error in words; it needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusible.ops.kernels.triton.device.call import call


class Kernel:
    """Stands for a kernel; notes its launches."""

    def __init__(self) -> None:
        self.module: object | None = None
        self.launches = list[Any]()

    def run(self, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        assert warmup
        return SimpleNamespace(module=self.module)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.launches.append((grid, arguments, constants))


@pytest.mark.parametrize("captures", [False, True])
def test_a_kernel_is_loaded_before_a_capture(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: captures)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    if captures:
        with pytest.raises(RuntimeError, match="loaded at its first call; call it once before the capture"):
            call(kernel, (1,), 2, N=3)
        assert not kernel.launches
        kernel.module = object()
    call(kernel, (1,), 2, N=3)
    assert kernel.launches == [((1,), (2,), {"N": 3})]
