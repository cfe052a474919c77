"""The differences between a GPU and the CPU that emulates it."""

from __future__ import annotations

import pytest
import torch

from fusible.ops.kernels import extension

NO_HOPPER = not torch.cuda.is_available() or extension.device_refusal(torch.cuda.current_device()) is not None
REASON = "needs a Hopper GPU and the built extension"

needs_hopper = pytest.mark.skipif(NO_HOPPER, reason=REASON)


def skip_module_without_hopper() -> None:
    """For modules whose parameters come from the extension, which a mark cannot keep from being collected."""
    if NO_HOPPER:
        pytest.skip(REASON, allow_module_level=True)


def synchronize(device: str) -> None:
    """Waits for the kernels of a GPU, whose faults are raised here; the emulation is done when a launch returns."""
    if device == "cuda":
        torch.cuda.synchronize()
