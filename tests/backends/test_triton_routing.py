"""Our Triton kernels that bring rows to experts and back, in Triton's interpreter; no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton_interpreter
from checks import routing as checks

from fusible import config
from fusible.fuser import RefusedError
from fusible.ops.kernels.doors import routing
from fusible.ops.kernels.triton.installed import NAME

DTYPES = [torch.float16, torch.float32]  # the interpreter does not round to bfloat16, it cuts off


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with triton_interpreter.interpreted(), config(backend=NAME):
        yield


@pytest.mark.parametrize("kind", ["any", "absent", "one", "few"])
@pytest.mark.parametrize(("tokens", "slots", "experts"), [*checks.SHAPES[:6], (130, 5, 40)])
def test_route_sorts_stably(tokens: int, slots: int, experts: int, kind: str) -> None:
    checks.check_route_sorts_stably("cpu", tokens, slots, experts, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_route_brings_weights_of_any_type(dtype: torch.dtype) -> None:
    checks.check_route_brings_weights_of_any_type("cpu", dtype)


def test_ids_that_lie_stay_inside() -> None:
    checks.check_ids_that_lie_stay_inside("cpu")


@pytest.mark.parametrize("kind", ["any", "absent"])
@pytest.mark.parametrize("columns", [1, 5, 1032])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_and_come_back(dtype: torch.dtype, columns: int, kind: str) -> None:
    for slots in (1, 3):
        checks.check_rows_go_and_come_back("cpu", 37, slots, 12, columns, dtype, kind)


@pytest.mark.parametrize("kind", ["any", "absent"])
@pytest.mark.parametrize(("tokens", "slots", "experts"), checks.SHAPES[:4])
def test_rows_of_any_number(tokens: int, slots: int, experts: int, kind: str) -> None:
    checks.check_rows_go_and_come_back("cpu", tokens, slots, experts, 72, torch.float16, kind)


def test_rows_with_a_pitch() -> None:
    checks.check_rows_with_a_pitch("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_slots(dtype: torch.dtype) -> None:
    checks.check_numbers_of_slots("cpu", dtype)


def test_refusals() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(RefusedError, match=r"needs rows of 16 or 32 bits, got torch\.float64"):
        routing.route(ids, 4, torch.float64)
    with pytest.raises(RefusedError, match="takes 1 to 4096 experts and at most 1073741823 rows, got 4097 and 6"):
        routing.route(ids, 4097)
    with pytest.raises(RefusedError, match=r"needs int32 or int64 ids, got torch\.int16"):
        routing.route(ids.short(), 4)
