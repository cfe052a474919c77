"""A cache of bounded size for keys that come back."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps the values of at least the last ``size`` keys that were looked up, and of at most twice as many.

    They are in two generations: once the younger one is full, the older one goes. A look-up in the younger one, the
    usual case, costs no more than that in a dictionary.
    """

    def __init__(self, size: int) -> None:
        self.young: dict[K, V] = {}  # to be asked first, with its own `get`
        self._size, self._old = size, dict[K, V]()

    def from_old(self, key: K) -> V | None:
        """The value of a key that is not among the young ones, which it joins; None if it is not there."""
        value = self._old.get(key)
        if value is not None:
            self.add(key, value)
        return value

    def add(self, key: K, value: V) -> None:
        """Adds a value, or makes it young again."""
        if len(self.young) >= self._size:
            self._old, self.young = self.young, {}
        self.young[key] = value

    def values(self) -> list[V]:
        """All of them."""
        return list({**self._old, **self.young}.values())

    def __len__(self) -> int:
        return len(self.values())
