"""Counts what is captured and replayed."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field


@dataclass
class Stats:
    """What this process has captured and replayed. Threads may lose some counts to each other.

    Attributes:
        captured: forms of calls, and of backwards, whose launches were captured.
        replayed: forwards and backwards of ops that were replayed.
        unsupported: forms of calls and of backwards that cannot be replayed, by the reason.
    """

    captured: int = 0
    replayed: int = 0
    unsupported: Counter[str] = field(default_factory=Counter)


counts = Stats()


def stats() -> Stats:
    """What has been captured and replayed so far, in all containers."""
    return deepcopy(counts)
