"""Cases of ``ep_gpu_cases`` that find more the longer they run, at the length of a proof; see ``ep_proof``."""

from __future__ import annotations

from collections.abc import Callable

from ep_gpu_cases import HERE, exchange, train
from ep_world import World

EXCHANGES, STEPS = (10_000, 500) if HERE.device == "cuda" else (HERE.exchanges, HERE.steps)


def thousands_of_exchanges_through_poisoned_buffers(world: World) -> None:
    exchange(world, EXCHANGES)


def a_model_trains_as_in_one_process(world: World) -> None:
    train(world, STEPS)


CASES: list[Callable[[World], None]] = [
    thousands_of_exchanges_through_poisoned_buffers,
    a_model_trains_as_in_one_process,
]
