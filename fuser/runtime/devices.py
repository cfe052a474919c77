"""Devices with asynchronous launches: the host waits for their values, and launches can be replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from ..contract.torch_private import current_raw_stream

current_stream: dict[str, Callable[[int], int]] = {"cuda": current_raw_stream}
"""By device type, the function from a device's index to the address of its current stream."""


def stream_of(tensor: Tensor) -> int:
    """The address of the current stream of a tensor's device; creates no object; 0 on devices without streams."""
    device = tensor.device
    return current_stream[device.type](device.index) if device.type in current_stream else 0


@contextmanager
def simulated(device_type: str, stream: int = 0) -> Iterator[None]:
    """A context in which calls on devices of the type are captured and replayed as on a GPU. For tests."""
    before = current_stream.copy()
    current_stream[device_type] = {None: stream, 0: stream}.__getitem__
    try:
        yield
    finally:
        current_stream.clear()
        current_stream.update(before)
