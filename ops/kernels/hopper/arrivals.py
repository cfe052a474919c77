"""Rows that one kernel brings while the next one multiplies the available ones (``csrc/fusible/arrivals.h``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..extension import workspace_bytes
from ..problems.gemm import GroupedGemm, Layout

ROWS = 64  # of a block, which the kernel tells of at once
_STRETCH_BYTES = 4096  # of a row, which a warp has under way at once
_ROWS_OF_WARP = 4  # a warp announces this many at once
_ALIGNMENT = 16


def counters(rows: int, groups: int, device: torch.device) -> Tensor:
    """Zeroed counters of the blocks of so many rows, followed by the workspace of the product that waits for them.

    Make them before the kernel that brings the rows: nothing may be launched between that kernel and the product.
    """
    return torch.zeros(_bytes_of_blocks(rows) + workspace_bytes(groups), dtype=torch.uint8, device=device)


def are_waited_for(problem: GroupedGemm) -> bool:
    """Whether the product has a kernel that waits for blocks of rows, rather than for the kernel that brings them."""
    p, epilogue = problem, problem.epilogue
    built_in = epilogue is not None and epilogue.spec.program is None
    return built_in and p.layout is Layout.NT and p.a.dtype == torch.bfloat16 and p.second is None


def arguments(problem: GroupedGemm) -> dict[str, Any]:
    """The arguments of the launch of such a product: counters, their final value, and the workspace."""
    arrived, first = problem.arrived, problem.a
    assert arrived is not None
    at = arrived.data_ptr()
    return {"arrived": at, "pieces": pieces_of_block(first), "workspace": at + _bytes_of_blocks(first.shape[0])}


def pieces_of_block(rows: Tensor) -> int:
    """How often a kernel tells of each block of such rows until it is there."""
    return ROWS // _ROWS_OF_WARP * -(-rows.shape[1] * rows.element_size() // _STRETCH_BYTES)


def _bytes_of_blocks(rows: int) -> int:
    return -(-4 * -(-rows // ROWS) // _ALIGNMENT) * _ALIGNMENT
