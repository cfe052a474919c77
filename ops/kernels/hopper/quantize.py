"""Quantisers on Hopper."""

from __future__ import annotations

from ..quantized_problem import Quantizing

NAME = "hopper"


def refusal(problem: Quantizing) -> str | None:
    """Why the copies cannot be made here; None: they can."""
    return "has no quantisers"


def run(problem: Quantizing) -> None:
    """Fills the copies."""
    raise NotImplementedError(str(problem))
