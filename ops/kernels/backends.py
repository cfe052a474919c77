"""The backends, in the order in which they are asked. A new one is a folder, with its table, and a line here."""

from __future__ import annotations

from .dispatch import register
from .hopper import backend as hopper
from .pytorch import backend as pytorch
from .triton import backend as triton

for _backend in (hopper, triton, pytorch):
    register(_backend.KERNELS)
