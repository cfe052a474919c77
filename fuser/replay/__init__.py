"""Captures the kernel launches of a call, and replays them for later calls of the same form."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

from ..runtime.devices import simulated

__all__ = ["Stats", "simulated", "stats"]


@dataclass
class Stats:
    """Counts of captures and replays in this process. Threads may lose some counts to each other."""

    captured: int = 0  # forms of calls, and of backwards, whose launches were captured
    replayed: int = 0  # forwards and backwards of ops that were replayed
    unsupported: Counter[str] = field(default_factory=Counter)  # forms that cannot be replayed, by the reason


counts = Stats()


def stats() -> Stats:
    """The counts so far, of all containers."""
    return deepcopy(counts)
