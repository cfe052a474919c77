"""A barrier for the hosts of all ranks."""

from __future__ import annotations

import torch
from torch import distributed as dist


def barrier(process_group: dist.ProcessGroup) -> None:
    """Returns once all ranks have called it; NCCL uses the current device, which torch must be told."""
    over_nccl = torch.cuda.is_available() and "nccl" in dist.get_backend_config(process_group)
    dist.barrier(process_group, device_ids=[torch.cuda.current_device()] if over_nccl else None)
