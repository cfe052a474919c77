"""Whether two loss curves are one, but for rounding: closer than curves from other initial weights are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SMOOTHED = 10  # steps

Curve = Sequence[float]


class Agreement(NamedTuple):
    """The largest distances of smoothed curves: from the base, and of the base's seeds from each other."""

    distance: float
    noise: float

    @property
    def holds(self) -> bool:
        return self.distance <= self.noise

    def __str__(self) -> str:
        return f"{self.distance:.4f} {'≤' if self.holds else '> (differs)'} {self.noise:.4f}"


def smoothed(curve: Curve) -> Tensor:
    """The means of all windows of :data:`SMOOTHED` neighbouring losses."""
    return torch.tensor(curve, dtype=torch.float64).unfold(0, min(SMOOTHED, len(curve)), 1).mean(1)


def distance(a: Curve, b: Curve) -> float:
    """The largest distance of two smoothed curves."""
    return float((smoothed(a) - smoothed(b)).abs().max())


def agreement(curve: Curve, base: Sequence[Curve]) -> Agreement:
    """Compares a curve with the last one of ``base``, from the same weights; the others began with other weights."""
    *others, same = base
    return Agreement(distance(curve, same), min(distance(other, same) for other in others))
