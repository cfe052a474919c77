"""Our own CUDA kernels that bring the rows of tokens to their experts and back."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .extension import TYPE_CODES, address, compiled, device_refusal, stream
from .rows import scale_arguments

NAME = "fusible"
MAX_EXPERTS = 512
MAX_SLOTS = 2**30 - 1


def refusal(ids: Tensor, num_experts: int, dtype: torch.dtype) -> str | None:
    """Why the kernels do not take these ids and rows of this dtype; None: they do."""
    if not ids.is_cuda:
        return f"needs a CUDA device, got {ids.device.type}"
    if (why := device_refusal(ids.get_device())) is not None:
        return why
    if ids.dtype not in (torch.int32, torch.int64):
        return f"needs int32 or int64 ids, got {ids.dtype}"
    if dtype not in TYPE_CODES:
        return f"needs rows of 16 or 32 bits, got {dtype}"
    if not 1 <= num_experts <= MAX_EXPERTS or ids.numel() > MAX_SLOTS:
        return f"takes 1 to {MAX_EXPERTS} experts and fewer than 2^30 rows, got {num_experts} and {ids.numel()}"
    return None


def route(ids: Tensor, num_experts: int, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of ids [T, k]: sizes and their sum [E + 1], order [S], place [T, k], and the weights [T, k] by row, fp32 [S]."""
    slots, device, ids = ids.numel(), ids.get_device(), ids.contiguous()
    shapes = (num_experts + 1,), (slots,), ids.shape, (_workspace(slots, num_experts),)
    counts, order, place, workspace = (ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
    scales = None if weights is None else ids.new_empty(slots, dtype=torch.float32)
    compiled().route(
        *(device, stream(device), ids.data_ptr(), ids.dtype == torch.int64, slots, num_experts),
        *(*scale_arguments(weights), counts.data_ptr(), order.data_ptr(), place.data_ptr()),
        *(address(scales), workspace.data_ptr()),
    )
    return counts, order, place, scales


def permute(x: Tensor, place: Tensor, counts: Tensor, out: Tensor, fill: bool) -> None:
    """``out[place[t, j]] = x[t]``; rows from the last of ``counts`` on become zero with ``fill``, else they stay."""
    compiled().spread_rows(*_rows(x, out, place, counts), fill)


def unpermute(rows: Tensor, place: Tensor, counts: Tensor, out: Tensor) -> None:
    """``out[t]`` = the sum over j of ``rows[place[t, j]]``, of those before the last of ``counts``."""
    compiled().sum_rows(*_rows(rows, out, place, counts))


def of_slots(numbers: Tensor, place: Tensor, counts: Tensor, out: Tensor) -> None:
    """``out[t, j] = numbers[place[t, j]]`` in float32, 0 for those from the last of ``counts`` on."""
    device, places = place.get_device(), (numbers.data_ptr(), place.data_ptr(), _last(counts))
    compiled().numbers_of_slots(device, stream(device), *places, place.numel(), out.data_ptr(), TYPE_CODES[out.dtype])


@cache
def _workspace(slots: int, num_experts: int) -> int:
    return int(compiled().route_workspace_bytes(slots, num_experts)) // 4


def _last(counts: Tensor) -> int:
    """The address of the last of 32-bit numbers."""
    return counts.data_ptr() + 4 * (counts.shape[0] - 1)


def _rows(source: Tensor, out: Tensor, place: Tensor, counts: Tensor) -> tuple[int, ...]:
    device, (tokens, slots) = source.get_device(), place.shape
    numbers = TYPE_CODES[source.dtype], tokens, source.shape[1], slots, place.data_ptr(), _last(counts)
    return device, stream(device), *numbers, source.data_ptr(), source.stride(0), out.data_ptr(), out.stride(0)
