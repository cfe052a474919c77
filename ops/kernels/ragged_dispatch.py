"""Which backend multiplies groups of any shapes, and why none before it."""

from __future__ import annotations

from typing import Protocol

from ...fuser.config import active_config
from .dispatch import Chosen, first_that_takes
from .hopper import ragged as hopper_ragged
from .pytorch import ragged_loop as loop_ragged
from .ragged import RaggedGemm


class RaggedBackend(Chosen[RaggedGemm], Protocol):
    """An implementation for groups of any shapes."""

    def run(self, problem: RaggedGemm, /) -> None:
        """Computes ``problem.out``."""


_BACKENDS: tuple[RaggedBackend, ...] = (hopper_ragged, loop_ragged)


def choose(problem: RaggedGemm) -> tuple[RaggedBackend, str]:
    """The first backend that can run the problem, or the one that the configuration asks for; and why none before it.

    Raises:
        RefusedError: the backend asked for cannot; or, when strict, the first one cannot on a CUDA device.
    """
    return first_that_takes(_BACKENDS, problem, active_config().backend, "ragged GEMM", problem.a.data.is_cuda)
