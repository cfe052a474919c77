"""Which containers know the children of a module: they forget them once somebody edits the module.

Plans hold ops. Without this, an op that has left would keep its parameters until the next call of every container that
has run it, the ones around an edited container or composite included.
"""

from __future__ import annotations

from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn


class Knows(Protocol):
    """What has looked into modules, and keeps something of what it saw."""

    def forget_children(self) -> None:
        """Drops it."""


_known: WeakKeyDictionary[nn.Module, WeakSet[Knows]] = WeakKeyDictionary()
_lock = Lock()


def tell_of_edits(module: nn.Module, knows: Knows) -> None:
    """Lets ``knows`` forget once the children of ``module`` change. Keeps neither alive."""
    with _lock:
        _known.setdefault(module, WeakSet()).add(knows)


def children_changed(module: nn.Module) -> None:
    """Says that a child was added, replaced or removed."""
    with _lock:
        told = list(_known.get(module, ()))
    for knows in told:
        knows.forget_children()
