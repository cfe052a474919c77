"""The compute capability of a CUDA device; or an assumed one, to say what runs on a GPU that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Capability(NamedTuple):
    """A compute capability: 9.0 is that of Hopper."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


_assumed: list[Capability] = []  # the last one counts; of the whole process, as devices are


def assumed() -> Capability | None:
    """The capability that every CUDA device is taken to have; None: devices are asked."""
    return _assumed[-1] if _assumed else None


@contextmanager
def assume(capability: Capability) -> Iterator[None]:
    """Within the body, every CUDA device has this capability. Use it through :func:`hopper.extension.assume`."""
    _assumed.append(capability)
    try:
        yield
    finally:
        _assumed.pop()


def capability_of(device: torch.device | int) -> Capability:
    """The capability of a CUDA device."""
    return assumed() or Capability(*torch.cuda.get_device_capability(device))
