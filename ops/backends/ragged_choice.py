"""Which backend multiplies groups of any shapes, and why none before it."""

from __future__ import annotations

from typing import Protocol

from ...fuser import RefusedError
from ...fuser.settings import current
from . import hopper_ragged, loop_ragged
from .ragged import RaggedGemm


class RaggedBackend(Protocol):
    """An implementation for groups of any shapes."""

    @property
    def NAME(self) -> str: ...

    def refusal(self, problem: RaggedGemm, /) -> str | None:
        """Why the problem cannot be run here; None: it can."""

    def run(self, problem: RaggedGemm, /) -> None:
        """Computes ``problem.out``."""


_BACKENDS: tuple[RaggedBackend, ...] = (hopper_ragged, loop_ragged)


def choose(problem: RaggedGemm) -> tuple[RaggedBackend, str]:
    """The first backend that can run the problem, or the one that the configuration asks for; and why none before it.

    Raises:
        RefusedError: the backend asked for cannot; or, when strict, the first one cannot on a CUDA device.
    """
    only, refusals = current().backend, list[str]()
    for backend in _BACKENDS:
        if only not in ("auto", backend.NAME):
            continue
        why = backend.refusal(problem)
        if why is None:
            reason = "; ".join(refusals)
            if reason and current().strict and problem.a.data.is_cuda:
                raise RefusedError(f"strict: the ragged GEMM falls back to {backend.NAME}, because {reason}")
            return backend, reason
        refusals.append(f"{backend.NAME} {why}")
    raise RefusedError(f"no backend for this ragged GEMM: {'; '.join(refusals) or f'{only} has no kernel for it'}")
