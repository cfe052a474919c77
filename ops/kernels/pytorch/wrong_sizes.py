"""Detection of wrong split sizes by operations of PyTorch, for kernels that report none.

Like our CUDA kernels, they report the first wrong group in host memory, and nothing waits for it. The words are those
of ``csrc/fusible/wrong_sizes.cpp``, which raises inside a launch and cannot call Python.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..architecture import is_capturing


class SizeReport:
    """The report of a device, on it and in a copy on the host: the group counted from 1, and its size."""

    @torch.inference_mode(False)  # calls of every mode write into both
    def __init__(self, device: torch.device) -> None:
        self._on_device = torch.zeros(2, dtype=torch.int64, device=device)
        self._on_host = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._last: weakref.ref[Tensor] | None = None
        self._version_and_rows = -1, -1

    def look_at(self, split_sizes: Tensor, rows: int) -> None:
        """Reports the first size that is negative, or larger than the rows left by the groups before it."""
        if not is_capturing(split_sizes.device) and self._has_seen(split_sizes, rows):
            return
        sizes = split_sizes.long()
        wrong = (sizes < 0) | (sizes.clamp(0, rows + 1).cumsum(0) > rows)
        first = wrong.int().argmax(keepdim=True)  # an index of no dimensions would be read on the host
        new = torch.cat((first + 1, sizes.gather(0, first))) * wrong.any()
        torch.where(self._on_device[0] == 0, new, self._on_device, out=self._on_device)
        self._on_host.copy_(self._on_device, non_blocking=True)

    def take(self) -> tuple[int, int] | None:
        """The group and its size, and clears the report; None if there is none."""
        group, size = self._on_host.tolist()
        if not group:
            return None
        self._on_host.zero_()
        self._on_device.zero_()
        return group - 1, size

    def _has_seen(self, split_sizes: Tensor, rows: int) -> bool:
        """Whether the last call had the same sizes, as all products of a layer do."""
        if split_sizes.is_inference():
            return False
        last, self._last = self._last, weakref.ref(split_sizes)  # one object for each tensor
        before, self._version_and_rows = self._version_and_rows, (split_sizes._version, rows)
        return last is self._last and before == self._version_and_rows


_reports: dict[torch.device, SizeReport] = {}


def look_at(split_sizes: Tensor, rows: int) -> None:
    """Raises the error reported for this device, and checks further sizes.

    Raises:
        RuntimeError: sizes of an earlier call were wrong.
    """
    device = split_sizes.device
    if device not in _reports:
        if is_capturing(device):
            return  # no memory of the host may be allocated now
        _reports[device] = SizeReport(device)
    raise_reported(device)
    _reports[device].look_at(split_sizes, rows)


def raise_reported(device: torch.device) -> None:
    """Raises the error reported for a device, and clears it; waits for nothing.

    Raises:
        RuntimeError: sizes of an earlier call were wrong.
    """
    if (error := taken(device)) is not None:
        raise error


def taken(device: torch.device) -> RuntimeError | None:
    """The error reported for a device, which is cleared."""
    report = _reports.get(device)
    wrong = None if report is None or is_capturing(device) else report.take()
    if wrong is None:
        return None
    group, size = wrong
    why = "which is negative" if size < 0 else "more than the rows that the groups before it leave"
    return RuntimeError(
        f"split_sizes on the device of an earlier call were wrong: the size of group {group} is {size}, {why}. "
        "Sizes were cut to fit, so the results of that call mean nothing. fusible.config(debug=True), or "
        "FUSIBLE_DEBUG=1, checks them before each call"
    )
