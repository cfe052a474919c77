"""A launch of a kernel. Triton compiles and loads one when it is first launched, which no CUDA graph captures."""

from __future__ import annotations

import torch

from .....fuser.replay import capture


def call(kernel, grid, *arguments, **constants):
    """Launches a kernel on the current device and stream; in a capture for replays, so that they can repeat it.

    Raises:
        RuntimeError: a CUDA graph is captured, and the kernel has not been launched on this device before.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _refuse_unloaded(kernel.run(*arguments, grid=grid, warmup=True, **constants))
    if capture.is_active():
        from . import foreign  # by its first use: it needs Triton

        try:
            return foreign.launch(kernel, grid, arguments, constants)
        except foreign.UnknownLaunchError as error:
            capture.refuse(f"a kernel of Triton runs, which the extension cannot launch: {error}")
    kernel[grid](*arguments, **constants)


def _refuse_unloaded(compiled):
    if compiled is None or compiled.module is None:
        raise RuntimeError("a kernel of Triton is loaded at its first call; call it once before the capture")
