"""A queue of delayed work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Generic, TypeVar

T = TypeVar("T")


class DelayedWork(Generic[T]):
    """Functions of an owner, first in first out. Any thread may add one; one thread at a time runs them.

    A copy starts empty.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[T], None]] = deque()
        self._running = RLock()

    def __reduce__(self) -> tuple[object, ...]:
        return DelayedWork, ()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, function: Callable[[T], None]) -> None:
        """Appends a function."""
        self._waiting.append(function)

    def run(self, owner: T) -> bool:
        """Runs all functions for their owner; returns whether there were any.

        One that raises stays first, for another attempt.
        """
        ran = False
        with self._running:
            while self._waiting:
                function = self._waiting.popleft()  # before it runs, as it may ask for the others
                try:
                    function(owner)
                except BaseException:
                    self._waiting.appendleft(function)
                    raise
                ran = True
        return ran
