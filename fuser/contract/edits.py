"""Which containers know the children of a module: they forget them once somebody edits the module.

Plans hold ops. Without this, an op that has left would keep its parameters until the next call of every container that
has run it, the ones around an edited container or composite included.
"""

from __future__ import annotations

from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn


class Observer(Protocol):
    """What has looked into modules, and keeps something of what it saw."""

    def forget_children(self) -> None:
        """Drops it."""


_observers: WeakKeyDictionary[nn.Module, WeakSet[Observer]] = WeakKeyDictionary()
_lock = Lock()


def tell_of_edits(module: nn.Module, observer: Observer) -> None:
    """Lets ``observer`` forget once the children of ``module`` change. Keeps neither alive."""
    with _lock:
        _observers.setdefault(module, WeakSet()).add(observer)


def children_changed(module: nn.Module) -> None:
    """Says that a child was added, replaced or removed."""
    with _lock:
        observers = list(_observers.get(module, ()))
    for observer in observers:
        observer.forget_children()
