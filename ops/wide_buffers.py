"""Buffers that keep their dtype when their module is cast: numbers that would be others in fewer bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def wide_buffers(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """For the body, which applies a function to all tensors of the module: of these buffers only the device changes."""
    before = {name: buffer for name in names if (buffer := module._buffers.get(name)) is not None}
    yield
    for name, buffer in before.items():
        after = module.get_buffer(name)
        if after.dtype != buffer.dtype:
            setattr(module, name, buffer.to(after.device))
