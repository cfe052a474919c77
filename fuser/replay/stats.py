"""Counts what is captured and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

_MANY_REASONS = 256


class Stats(NamedTuple):
    """What this process has captured and replayed.

    Attributes:
        captured: forms of calls, and of backwards, whose launches were captured.
        replayed: forwards and backwards of ops that were replayed.
        unsupported: forms of calls and of backwards that cannot be replayed, by the reason.
    """

    captured: int
    replayed: int
    unsupported: Mapping[str, int]


class Counts:
    """The numbers so far. Threads may lose some to each other."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.unsupported = Counter[str]()

    def refused(self, reason: str) -> None:
        """Counts a form that cannot be replayed."""
        if reason in self.unsupported or len(self.unsupported) < _MANY_REASONS:
            self.unsupported[reason] += 1


counts = Counts()


def stats() -> Stats:
    """What has been captured and replayed so far, in all containers."""
    return Stats(counts.captured, counts.replayed, dict(counts.unsupported))
