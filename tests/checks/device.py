"""What differs between a GPU and the CPU that emulates it."""

from __future__ import annotations

import torch


def synchronize(device: str) -> None:
    """Waits for the kernels of a GPU, whose faults are raised here; the emulation is done when a launch returns."""
    if device == "cuda":
        torch.cuda.synchronize()
