"""Our own CUDA kernels that bring the rows of tokens to their experts and back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream
from ..problems.routing import Permuting, SlotOrder
from .gemm import MAX_GROUPS
from .rows import scale_arguments

NAME = "fusible"
MAX_SLOTS = 2**30 - 1


def refusal(p: Permuting) -> str | None:
    """Why the kernels do not take the ids and the rows of a problem; None: they do."""
    ids, num_experts, dtype = p.ids, p.num_experts, p.dtype
    if (why := hardware_refusal(ids)) is not None:
        return why
    if ids.dtype not in (torch.int32, torch.int64):
        return f"needs int32 or int64 ids, got {ids.dtype}"
    if dtype not in TYPE_CODES:
        return f"needs rows of 16 or 32 bits, got {dtype}"
    if not 1 <= num_experts <= MAX_GROUPS or ids.numel() > MAX_SLOTS:
        return f"takes 1 to {MAX_GROUPS} experts and fewer than 2^30 rows, got {num_experts} and {ids.numel()}"
    return None


def route(ids: Tensor, num_experts: int, weights: Tensor | None) -> SlotOrder:
    """Sorts ids [T, k]; returns tokens per expert and their sum [E + 1], slot of each row [S], row of each slot [T, k].

    The last result is the weight of each row in fp32 [S], if weights are given.
    """
    slots, device, ids = ids.numel(), ids.get_device(), ids.contiguous()
    shapes = (num_experts + 1,), (slots,), ids.shape, (_workspace(slots, num_experts),)
    empty = partial(ids.new_empty, dtype=torch.int32)
    tokens_per_expert, slot_of_row, row_of_slot, workspace = map(empty, shapes)
    scales = None if weights is None else ids.new_empty(slots, dtype=torch.float32)
    weight, weights_type = scale_arguments(weights)
    compiled().route(
        device=device,
        stream=stream(device),
        ids=ids.data_ptr(),
        int64_ids=ids.dtype == torch.int64,
        slots=slots,
        groups=num_experts,
        tokens_per_expert=tokens_per_expert.data_ptr(),
        slot_of_row=slot_of_row.data_ptr(),
        row_of_slot=row_of_slot.data_ptr(),
        workspace=workspace.data_ptr(),
        weights=weight,
        weights_type=weights_type,
        scales=address(scales),
    )
    return SlotOrder(tokens_per_expert, slot_of_row, row_of_slot, scales)


def permute(x: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor, out: Tensor, fill: bool) -> None:
    """``out[row_of_slot[t, j]] = x[t]``; rows from the last of ``tokens_per_expert`` on become zero with ``fill``."""
    compiled().permute(**_rows(x, out, row_of_slot, tokens_per_expert), fill=fill)


def unpermute(rows: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor, out: Tensor) -> None:
    """``out[t]`` = the sum over j of ``rows[row_of_slot[t, j]]``, of those before the last of ``tokens_per_expert``."""
    compiled().unpermute(**_rows(rows, out, row_of_slot, tokens_per_expert))


def of_slots(numbers: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor, out: Tensor) -> None:
    """``out[t, j] = numbers[row_of_slot[t, j]]`` in float32, 0 for those from the last of ``tokens_per_expert`` on."""
    device = row_of_slot.get_device()
    compiled().gather_slots(
        device=device,
        stream=stream(device),
        values=numbers.data_ptr(),
        row_of_slot=row_of_slot.data_ptr(),
        num_rows=_last_address(tokens_per_expert),
        slots=row_of_slot.numel(),
        out=out.data_ptr(),
        type=TYPE_CODES[out.dtype],
    )


def _workspace(slots: int, num_experts: int) -> int:
    """The workspace in elements. Computed at every call, so that a capture sees the sizes that it depends on."""
    return int(compiled().route_workspace_bytes(slots=slots, groups=num_experts)) // 4


def _last_address(tokens_per_expert: Tensor) -> int:
    """The address of the last of 32-bit numbers."""
    return tokens_per_expert.data_ptr() + 4 * (tokens_per_expert.shape[0] - 1)


def _rows(source: Tensor, out: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor) -> dict[str, int]:
    device, (tokens, top_k) = source.get_device(), row_of_slot.shape
    return {
        "device": device,
        "stream": stream(device),
        "type": TYPE_CODES[source.dtype],
        "tokens": tokens,
        "columns": source.shape[1],
        "top_k": top_k,
        "row_of_slot": row_of_slot.data_ptr(),
        "num_rows": _last_address(tokens_per_expert),
        "source": source.data_ptr(),
        "source_pitch": source.stride(0),
        "out": out.data_ptr(),
        "out_pitch": out.stride(0),
    }
