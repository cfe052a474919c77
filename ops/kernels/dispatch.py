"""Which backend runs a grouped GEMM, and why none before it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ...fuser import RefusedError
from ...fuser.config import active_config
from .hopper import gemm as hopper
from .interface import Backend
from .problem import GroupedGemm
from .pytorch import grouped_mm, loop

P_contra = TypeVar("P_contra", contravariant=True)


class Chosen(Protocol[P_contra]):
    """What can be chosen for problems of a kind."""

    @property
    def NAME(self) -> str: ...

    def refusal(self, problem: P_contra, /) -> str | None:
        """Why the problem cannot be run here; None: it can."""


B = TypeVar("B", bound=Chosen[Any])


class Choice(NamedTuple):
    """A backend, and why none before it."""

    backend: Backend
    reason: str


_BACKENDS: tuple[Backend, ...] = (hopper, grouped_mm, loop)
_HOPPER = Choice(hopper, "")
_ON_CPU = Choice(loop, "")  # the only one for a CPU; why, only a trace wants to know
_first_takes: set[tuple[Hashable, ...]] = set()  # kinds of problems; as many as there are layers of different sizes


def choose(problem: GroupedGemm, tracing: bool) -> Choice:
    """The first backend that can run the problem, or the one that the configuration asks for.

    Args:
        tracing: the tensors hold no data, and the reason is wanted.

    Raises:
        RefusedError: the backend asked for cannot; or, when strict, the first one cannot on a CUDA device.
    """
    only = active_config().backend
    if tracing:
        return _ask(problem, only)
    if not problem.a.is_cuda and only == "auto":
        return _ON_CPU
    kind = problem.kind if only in ("auto", hopper.NAME) else None
    if kind in _first_takes:
        return _HOPPER
    choice = _ask(problem, only)
    if kind is not None and choice.backend is hopper:
        _first_takes.add(kind)
    return choice


def _ask(problem: GroupedGemm, only: str) -> Choice:
    return Choice(*first_that_takes(_BACKENDS, problem, only, "grouped GEMM", problem.a.is_cuda))


def first_that_takes(backends: Sequence[B], problem: Any, only: str, what: str, on_cuda: bool) -> tuple[B, str]:
    """The first backend that takes the problem, and why none before it.

    Args:
        only: the name of the one that may, or ``"auto"``.
        what: names such problems in errors.
        on_cuda: whether a fallback is one, when strict.

    Raises:
        RefusedError: none takes it; or, when strict, not the first.
    """
    refusals: list[str] = []
    for backend in backends:
        if only not in ("auto", backend.NAME):
            continue
        why = backend.refusal(problem)
        if why is None:
            reason = "; ".join(refusals)
            if reason and on_cuda and active_config().strict:
                raise RefusedError(f"strict: the {what} falls back to {backend.NAME}, because {reason}")
            return backend, reason
        refusals.append(f"{backend.NAME} {why}")
    raise RefusedError(f"no backend for this {what}: {'; '.join(refusals) or f'{only} has no kernel for it'}")
