"""Runs of whole groups of a weight: what is made of its bytes by PyTorch is made a run at a time, to bound memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

RUN = 1 << 24
"""The most weights of a run of several groups; PyTorch has temporaries of about eight bytes for each."""


def runs(groups: int, weights: int) -> Iterator[slice]:
    """Slices of consecutive groups of so many weights each: as many as fit into a run, and at least one."""
    step = max(1, RUN // max(1, weights))
    return (slice(first, min(first + step, groups)) for first in range(0, groups, step))


def decode_in_runs(values: Callable[[slice], Tensor], out: Tensor) -> None:
    """Fills ``out`` [E, N, K].

    Args:
        values: float values of the groups of a slice.
    """
    groups, rows, columns = out.shape
    for run in runs(groups, rows * columns):
        out[run] = values(run)
