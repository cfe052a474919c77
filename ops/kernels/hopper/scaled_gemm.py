"""Products of quantised operands on Hopper."""

from __future__ import annotations

from ..quantized_problem import Multiplying

NAME = "hopper"


def refusal(problem: Multiplying) -> str | None:
    """Why the product cannot be run here; None: it can."""
    return "has no products of quantised operands"


def run(problem: Multiplying) -> None:
    """Computes ``problem.out``."""
    raise NotImplementedError(str(problem))
