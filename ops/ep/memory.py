"""Shared memory of equal size on every rank, which all ranks of a host can read and write."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ...fuser.contract.torch_private import symmetric_addresses, symmetric_memory, symmetric_memory_refusal


class SharedMemory(NamedTuple):
    """The shared memory of one rank.

    Attributes:
        bytes: uint8, the memory on the device of this rank.
        addresses: the address of every rank's memory, in this rank's address space.
        mapping: the object that keeps it mapped.
    """

    bytes: Tensor
    addresses: list[int]
    mapping: Any


class Location(NamedTuple):
    """The location of a rank: its host, and the index of its device in its process."""

    host: str
    device: int

    @classmethod
    def here(cls, on: torch.device | None) -> Location:
        return cls(socket.gethostname(), -1 if on is None or on.index is None else on.index)

    def unreachable(self, ranks: Sequence[Location]) -> str | None:
        """The reason why the memory of some rank cannot be read from here, or None."""
        for rank, other in enumerate(ranks):
            if other.host != self.host:
                return f"is on host {self.host}, rank {rank} on {other.host}; it serves the GPUs of one host"
        for rank, other in enumerate(ranks):
            counted_alike = 0 <= other.device < torch.cuda.device_count() and 0 <= self.device != other.device
            if counted_alike and not torch.cuda.can_device_access_peer(self.device, other.device):
                return f"has cuda:{self.device}, which does not reach cuda:{other.device} of rank {rank}"
        return None


def in_capture() -> bool:
    """Whether launches are being captured in a CUDA graph, so that the host may not wait and nothing be allocated."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def device() -> torch.device | None:
    """The device of this rank, whose memory others can read; None if it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def multiprocessors(on: torch.device) -> int:
    """The number of multiprocessors of a device; 0 if it is not a GPU."""
    return torch.cuda.get_device_properties(on).multi_processor_count if on.type == "cuda" else 0


def refusal() -> str | None:
    """The reason why :func:`allocate` cannot be called, or None."""
    return symmetric_memory_refusal()


def allocate(nbytes: int, on: torch.device, process_group: dist.ProcessGroup) -> SharedMemory:
    """Allocates the same number of bytes on every rank. Collective.

    Raises:
        RuntimeError: on all ranks, if a device does not have as much memory, or cannot access that of another.
    """
    allocated = _on_all_ranks(nbytes, on, process_group)
    try:
        return SharedMemory(allocated, *symmetric_addresses(allocated, process_group.group_name))
    except RuntimeError as error:
        raise RuntimeError(
            f"Group: transport 'symmetric' gets no memory that all ranks can read: {error}; use transport='collective'"
        ) from error


def _on_all_ranks(nbytes: int, on: torch.device, process_group: dist.ProcessGroup) -> Tensor:
    """Memory of this rank, once all have theirs: a rank that meets the others alone would wait for them."""
    allocated, failure = None, None
    try:
        allocated = symmetric_memory(nbytes, on)
    except RuntimeError as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(failures, failure, process_group)
    for rank, each in enumerate(failures):
        if each is not None:
            raise RuntimeError(
                f"Group: transport 'symmetric' gets no {nbytes >> 20} MB of memory on rank {rank}: {each}; "
                "make the group with a smaller capacity or fewer max_tokens, or use transport='collective'"
            )
    assert allocated is not None
    return allocated


def for_reports(on: torch.device, numbers: int) -> Tensor:
    """A zeroed int64 tensor in host memory that a device writes and the host reads without waiting."""
    return torch.zeros(numbers, dtype=torch.int64, device="cpu", pin_memory=on.type == "cuda")
