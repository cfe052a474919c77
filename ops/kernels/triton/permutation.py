"""Rows from tokens to their experts and back, in Triton."""

from __future__ import annotations

import torch

from ..problems.routing import Permuting
from .installed import DTYPES, MAX_GROUPS, MAX_ROWS, NAME, launches_on, triton_refusal

__all__ = ["NAME", "refusal", "run"]


def refusal(p: Permuting) -> str | None:
    """Why the kernels do not take these ids and rows; None: they do."""
    ids, experts = p.ids, p.num_experts
    if (why := triton_refusal(ids)) is not None:
        return why
    if ids.dtype not in (torch.int32, torch.int64):
        return f"needs int32 or int64 ids, got {ids.dtype}"
    if p.dtype not in DTYPES:
        return f"needs rows of 16 or 32 bits, got {p.dtype}"
    if not 1 <= experts <= MAX_GROUPS or ids.numel() > MAX_ROWS:
        return f"takes 1 to {MAX_GROUPS} experts and at most {MAX_ROWS} rows, got {experts} and {ids.numel()}"
    return None


def run(p: Permuting) -> None:
    """Solves a problem that is not refused."""
    from .device import permutation

    with launches_on(p.ids):
        p.solve(permutation)
