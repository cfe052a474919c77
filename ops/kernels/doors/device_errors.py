"""Errors that kernels have found in a call. Kernels do not stop for them, and the host learns of them later."""

from __future__ import annotations

import torch

from ... import kernels


def check_device_errors(device: torch.device | str | int | None = None) -> None:
    """Raises what kernels on a GPU have reported of split sizes, and forgets it.

    A negative size, or sizes that sum to more than the rows, are known to the GPU alone. Kernels cut off what does not
    fit, and report it in a word that the host reads. On a GPU that has none of our kernels, operations of PyTorch do.
    The next call on that GPU raises it, and so does this function. It waits for nothing: it tells of the calls that are
    done. After a synchronisation, such as ``loss.item()``, those are all. Replays of CUDA graphs report as well.

    Args:
        device: a CUDA device; all of them by default.

    Raises:
        RuntimeError: a kernel has reported wrong sizes. It names the group and its size.
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
