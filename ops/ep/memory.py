"""Memory of which every rank has as much, and that all ranks of a host read and write."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ...fuser.torch_private import symmetric_memory, symmetric_memory_refusal


class SharedMemory(NamedTuple):
    """That of one rank.

    Attributes:
        bytes: uint8, on the device of this rank.
        addresses: of that of every rank, as this rank sees them.
        mapping: what keeps it mapped.
    """

    bytes: Tensor
    addresses: list[int]
    mapping: Any


def device() -> torch.device | None:
    """The device of this rank, whose memory others can read; None: it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def refusal() -> str | None:
    """Why there is none; None: :func:`allocate` can be called."""
    return symmetric_memory_refusal()


def allocate(nbytes: int, on: torch.device, process_group: dist.ProcessGroup) -> SharedMemory:
    """As many bytes on every rank. Collective.

    Raises:
        RuntimeError: the devices of the ranks do not reach one another.
    """
    try:
        return SharedMemory(*symmetric_memory(nbytes, on, process_group.group_name))
    except RuntimeError as error:
        raise RuntimeError(
            f"Group: transport 'symmetric' gets no memory that all ranks can read: {error}; use transport='collective'"
        ) from error


def for_reports(on: torch.device, numbers: int) -> Tensor:
    """int64 in memory of the host that a device writes, and the host reads without waiting for it. Zero."""
    return torch.zeros(numbers, dtype=torch.int64, device="cpu", pin_memory=on.type == "cuda")
