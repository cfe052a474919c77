"""Ranks of the transport ``symmetric`` as processes of one machine: our kernels run on the CPU (``emulation``), on
files that all processes map, each at other addresses. Ranks run at the same time, and signals are real: atomic words.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from emulation import build, harness
from torch import distributed as dist

from fusible.ops.ep import memory
from fusible.ops.kernels.doors import routing
from fusible.ops.kernels.hopper import arrivals, peers, permute


def allocate(nbytes: int, on: torch.device, process_group: dist.ProcessGroup) -> memory.SharedMemory:
    """A file for each rank. It holds NaN at first, whatever type it is read as."""
    descriptor, path = tempfile.mkstemp(dir="/dev/shm", prefix="fusible_ep_")
    os.truncate(descriptor, nbytes)
    os.close(descriptor)
    paths: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(paths, path, process_group)
    mapped = [torch.from_file(p, shared=True, size=nbytes, dtype=torch.uint8) for p in paths]
    own = mapped[dist.get_rank(process_group)].fill_(0xFF)
    dist.barrier(process_group)
    Path(path).unlink()
    return memory.SharedMemory(own, [each.data_ptr() for each in mapped], mapped)


def for_reports(on: torch.device, numbers: int) -> torch.Tensor:
    return torch.zeros(numbers, dtype=torch.int64)


def sum_of_slots(rows: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
    """As GPUs sum: in float32, in the order of the slots, rounded once; that of PyTorch's CPU rounds halves up."""
    slots = rows.index_select(0, row_of_slot.view(-1)).view(*row_of_slot.shape, rows.shape[1])
    total = torch.zeros_like(slots[:, 0], dtype=torch.float32)
    for slot in range(row_of_slot.shape[1]):
        total += slots[:, slot].float()
    return total.to(rows.dtype)


@contextmanager
def on_this_machine() -> Iterator[None]:
    """In place of GPUs that reach one another. Nothing but the transport believes in a GPU."""
    gc.freeze()  # what is there by now is not asked for its memory at every launch
    emulation = harness.Emulation(build.build())
    launches = {"compiled": lambda: emulation, "stream": lambda device: 0}
    memory_of_files = {"device": lambda: torch.device("cpu"), "refusal": lambda: None, "allocate": allocate}
    with (
        patch.multiple(peers, **launches, device_refusal=lambda device: None),
        patch.multiple(permute, **launches),
        patch.object(arrivals, "workspace_bytes", lambda groups: emulation.workspace_bytes(groups)),
        patch.multiple(memory, **memory_of_files, for_reports=for_reports),
        patch.object(routing, "_sum_of_slots", sum_of_slots),
        patch.object(torch.Tensor, "get_device", lambda tensor: 0),
    ):
        yield
