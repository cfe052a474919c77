"""The door to the routed experts of a layer as a whole: the one call without gradients, and what both ways share."""

from __future__ import annotations

from .backends import routed_mlp
from .backends.routed_mlp import Experts, RoutedMlp

__all__ = ["Experts", "RoutedMlp", "compiled"]


def compiled(experts: Experts) -> RoutedMlp | None:
    """The one call, where our kernels take these experts."""
    return RoutedMlp(experts) if routed_mlp.refusal(experts) is None else None
