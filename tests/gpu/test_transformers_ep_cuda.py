"""Expert parallelism of transformers on several GPUs: models train and generate like one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import ep_world
import pytest
import torch

try:
    import ep_transformers_cases as cases
except ImportError as error:
    pytest.skip(f"transformers has no expert parallelism: {error}", allow_module_level=True)

GPUS = torch.cuda.device_count()
ON_TWO = (
    cases.sharded_by_fsdp,
    cases.on_tensor_parallel_ranks,
    cases.a_rank_without_rows,
    cases.a_fixed_number_of_rows,
    cases.checkpointing_exchanges_again,
    cases.other_experts_get_rows,
    cases.other_models,
    cases.generated_tokens_are_those_of_one_process,
)
RUNS = {  # by name: the module of the cases, the ranks, the transport, the cases
    "two": ("ep_transformers_cases", 2, "collective", ON_TWO),
    "four": ("ep_transformers_cases_of_four", 4, "collective", tuple(cases.ON_FOUR)),
    "memory": ("ep_transformers_cases_symmetric", 2, "symmetric", tuple(cases.SYMMETRIC)),
}
EACH = [(run, case.__name__) for run, (*_, of_run) in RUNS.items() for case in of_run]
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, here are {GPUS}")]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[str]]]:
    """A function that starts the ranks of a run, once, and returns their messages on its cases."""

    @cache
    def started(run: str) -> dict[str, list[str]]:
        module, ranks, transport, of_run = RUNS[run]
        only = [case.__name__ for case in of_run]
        return ep_world.start(module, ranks, tmp_path_factory.mktemp(run), 180, transport, "cuda", only)

    return started


@pytest.mark.parametrize(("run", "case"), EACH)
def test_models(run: str, case: str, said: Callable[[str], dict[str, list[str]]]) -> None:
    if RUNS[run][1] > GPUS:
        pytest.skip(f"needs {RUNS[run][1]} GPUs, here are {GPUS}")
    ep_world.assert_passed(case, said(run))
