"""Notification of containers about edits of modules that they have looked into.

Plans hold ops. Without it, a removed op would keep its parameters until the next call of every container that has run
it, including those around an edited container or composite.
"""

from __future__ import annotations

from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn


class Observer(Protocol):
    """An object that has looked into modules, and caches what it saw."""

    def forget_children(self) -> None:
        """Drops the cache."""


_observers: WeakKeyDictionary[nn.Module, WeakSet[Observer]] = WeakKeyDictionary()
_lock = Lock()


def tell_of_edits(module: nn.Module, observer: Observer) -> None:
    """Makes ``observer`` drop its cache when the children of ``module`` change. Keeps neither alive."""
    with _lock:
        _observers.setdefault(module, WeakSet()).add(observer)


def children_changed(module: nn.Module) -> None:
    """Says that a child was added, replaced or removed."""
    with _lock:
        observers = list(_observers.get(module, ()))
    for observer in observers:
        observer.forget_children()
