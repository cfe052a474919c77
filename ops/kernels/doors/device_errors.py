"""Errors that kernels have found in a call. Kernels do not stop for them, and the host learns of them later."""

from __future__ import annotations

import torch

from ... import kernels


def check_device_errors(device: torch.device | str | int | None = None) -> None:
    """Raises the error that kernels on a GPU have reported about split sizes, and forgets it.

    Only the GPU knows a negative size, or sizes that sum to more than the rows. Kernels cut such sizes and report them
    in a word that the host reads; on a GPU without our kernels, operations of PyTorch do. The next call on that GPU
    raises the error, and so does this function. It does not wait: it reports calls that have ended. After a
    synchronisation, such as ``loss.item()``, all have. Replays of CUDA graphs report as well.

    Args:
        device: a CUDA device; by default all of them.

    Raises:
        RuntimeError: a kernel has reported wrong sizes. The message names the group and its size.
    """
    for index in _indices(device):
        kernels.raise_wrong_sizes(index)


def _indices(device: torch.device | str | int | None) -> range | tuple[int]:
    if device is None:
        return range(torch.cuda.device_count())
    if isinstance(device, int):
        return (device,)
    index = torch.device(device).index
    return (torch.cuda.current_device() if index is None else index,)
