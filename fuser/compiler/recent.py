"""A cache of bounded size for recurring keys."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps the values of at least the last ``size`` keys that were looked up, and at most twice as many.

    There are two generations: when the younger is full, the older is dropped. A look-up in the younger one, the usual
    case, costs as much as in a dictionary.
    """

    def __init__(self, size: int) -> None:
        self.young: dict[K, V] = {}  # to be asked first, with its own `get`
        self._size, self._old = size, dict[K, V]()

    def from_old(self, key: K) -> V | None:
        """The value of a key in the older generation, which moves to the younger; None if it is missing."""
        value = self._old.get(key)
        if value is not None:
            self.add(key, value)
        return value

    def add(self, key: K, value: V) -> None:
        """Adds a value, or moves it to the younger generation."""
        if len(self.young) >= self._size:
            self._old, self.young = self.young, {}
        self.young[key] = value

    def values(self) -> list[V]:
        """All values."""
        return list({**self._old, **self.young}.values())

    def __len__(self) -> int:
        return len(self.values())
