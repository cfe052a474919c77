"""The common part of patterns of a routed layer: the experts read the dispatch's outputs, and have its number."""

from __future__ import annotations

from collections.abc import Iterable

from ...fuser import Pattern
from ..routed.moe import ROUTING


def routed(path: Pattern, scales: Iterable[str], to_combine: Iterable[str] = ROUTING) -> Pattern:
    """A path from ``dispatch`` to ``combine`` whose ``fc1``, ``fc2`` and ``scales`` read the outputs of the dispatch.

    ``act`` may read them as well.
    """
    for role in ("fc1", "fc2"):
        path = path.edge("dispatch", role, "split_sizes")
    for role in scales:
        path = path.edge("dispatch", role, "scales")
    for name in to_combine:
        path = path.edge("dispatch", "combine", name)
    return path.may_read("dispatch", "act", "scales", "split_sizes")


def with_as_many_groups(path: Pattern) -> Pattern:
    """The path, where both linears have the experts of the dispatch."""
    return path.where(
        "dispatch, fc1 and fc2 have different numbers of experts",
        lambda match: bool(match.dispatch.num_experts == match.fc1.num_groups == match.fc2.num_groups),
    )
