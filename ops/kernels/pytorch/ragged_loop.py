"""Groups of any shapes one by one. Any device and dtype; needs the shapes on the host."""

from __future__ import annotations

from ....fuser import ArgumentError
from ..architecture import is_capturing
from ..problems.gemm import Layout
from ..problems.ragged import RaggedGemm
from . import loop

NAME = loop.NAME


def refusal(problem: RaggedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    captured = is_capturing(problem.a.data.device)
    return "reads shapes on the host, which a CUDA graph cannot" if captured else None


def run(problem: RaggedGemm) -> None:
    """Computes ``problem.out``.

    Raises:
        ArgumentError: the depths of a group's operands differ.
    """
    p = problem
    if p.fresh:
        p.out.data.zero_()
    for g, (left, right, result) in enumerate(zip(p.a.split(), p.b.split(), p.out.split(), strict=True)):
        left = left.mT if p.layout is Layout.TN else left
        right = right.mT if p.layout is Layout.NT else right
        if left.shape[1] != right.shape[0]:
            raise ArgumentError(f"group {g}: the depths {left.shape[1]} and {right.shape[0]} of a and b must be equal")
        bias = None if p.bias is None else p.bias[g]
        loop.multiply(left, right, result, loop.factor_of(p.alpha, g), loop.factor_of(p.beta, g), bias)
