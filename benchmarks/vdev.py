"""torch's exchange of rows with sizes on the device: ``all_to_all_vdev_2d``, through NVSHMEM."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

_OPS = ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset")


def refusal(device: torch.device) -> str | None:
    """The reason why it cannot run (torch's error if it was tried), or None.

    Makes NVSHMEM the source of this process's symmetric memory. Call it on all ranks before allocating any.

    Args:
        device: with its index: NVSHMEM's teams treat ``cuda`` and ``cuda:0`` as two devices, and serve one.
    """
    if device.type != "cuda":
        return f"all_to_all_vdev_2d needs GPUs, the device is {device}"
    try:
        import torch.distributed._symmetric_memory as memory

        for name in _OPS:
            getattr(torch.ops.symm_mem, name)
        if not memory.is_nvshmem_available():
            return f"torch {torch.__version__} finds no NVSHMEM"
        memory.set_backend("NVSHMEM")
        _symmetric(1, dtype=torch.int64, device=device)
    except (AttributeError, ImportError, RuntimeError) as error:
        return f"torch {torch.__version__} has no all_to_all_vdev_2d that runs: {error}"
    return None


def _symmetric(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Symmetric memory: every rank allocates the same size, visible to the others."""
    import torch.distributed._symmetric_memory as memory

    tensor = memory.empty(*shape, dtype=dtype, device=device)
    memory.rendezvous(tensor, group=_world())
    return tensor


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


class DeviceExchange:
    """Buffers for tokens [T, H] whose experts are ``ids`` [T, k]; a rank owns at most ``most_rows`` rows.

    Attributes:
        rows: the result of :meth:`dispatch`, sorted by expert, then rank.
    """

    def __init__(self, x: Tensor, ids: Tensor, num_experts: int, most_rows: int) -> None:
        slots, hidden, device = ids.numel(), x.shape[1], x.device
        self._top_k, self._experts = ids.shape[1], num_experts
        self._sent = _symmetric(slots, hidden, dtype=x.dtype, device=device)
        self.rows = _symmetric(most_rows, hidden, dtype=x.dtype, device=device)
        self._returned = _symmetric(slots, hidden, dtype=x.dtype, device=device)
        self._sizes = _symmetric(num_experts, dtype=torch.int64, device=device)
        self._arrived, self._back = (_symmetric(2, num_experts, dtype=torch.int64, device=device) for _ in range(2))
        self._order = ids.flatten()

    def dispatch(self, x: Tensor, ids: Tensor) -> None:
        """Sorts the slots by expert, and sends their tokens to the owners."""
        self._order = ids.flatten().sort(stable=True).indices
        self._sizes.copy_(torch.bincount(ids.flatten(), minlength=self._experts))
        torch.index_select(x, 0, self._order // self._top_k, out=self._sent)
        torch.ops.symm_mem.all_to_all_vdev_2d(self._sent, self.rows, self._sizes, self._arrived, _world().group_name)

    def combine(self) -> Tensor:
        """Sends the rows back; returns the sum [T, H] of each token's rows."""
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self.rows, self._returned, self._arrived, self._back, _world().group_name
        )
        slots = torch.empty_like(self._returned).index_copy_(0, self._order, self._returned)
        return slots.view(-1, self._top_k, slots.shape[1]).sum(1)
