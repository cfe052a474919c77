"""The CUDA kernels that bring rows to experts and back, against plain PyTorch; needs the extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from checks.device import needs_hopper
from checks.routing import (
    SHAPES,
    check_ids_that_lie_stay_inside,
    check_numbers_of_slots,
    check_route_brings_weights_of_any_type,
    check_route_sorts_stably,
    check_rows_go_and_come_back,
    check_rows_with_a_pitch,
    draw,
    expected,
    numbers,
)
from torch import Tensor

from fusible.ops.kernels.doors import routing

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("kind", ["any", "absent", "one", "few"])
@pytest.mark.parametrize(("tokens", "slots", "experts"), SHAPES)
def test_route_sorts_stably(tokens: int, slots: int, experts: int, kind: str) -> None:
    check_route_sorts_stably("cuda", tokens, slots, experts, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_route_brings_weights_of_any_type(dtype: torch.dtype) -> None:
    check_route_brings_weights_of_any_type("cuda", dtype)


def test_ids_that_lie_stay_inside() -> None:
    check_ids_that_lie_stay_inside("cuda")


@pytest.mark.parametrize("kind", ["any", "absent"])
@pytest.mark.parametrize("columns", [1, 5, 8, 264, 1032])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_and_come_back(dtype: torch.dtype, columns: int, kind: str) -> None:
    for slots in range(1, 9):
        check_rows_go_and_come_back("cuda", 37, slots, 12, columns, dtype, kind)


@pytest.mark.parametrize("kind", ["any", "absent"])
@pytest.mark.parametrize(("tokens", "slots", "experts"), SHAPES)
def test_rows_of_any_number(tokens: int, slots: int, experts: int, kind: str) -> None:
    check_rows_go_and_come_back("cuda", tokens, slots, experts, 72, torch.bfloat16, kind)


def test_rows_with_a_pitch() -> None:
    check_rows_with_a_pitch("cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_slots(dtype: torch.dtype) -> None:
    check_numbers_of_slots("cuda", dtype)


def test_twice_is_bitwise_the_same() -> None:
    ids, rows = draw("cuda", 3000, 8, 64), numbers("cuda", 24000, 72, dtype=torch.bfloat16)
    results = [(found := routing.route(ids, 64, torch.bfloat16), routing.unpermute(rows, found)) for _ in range(2)]

    assert all(torch.equal(a, b) for a, b in zip(results[0][0][:3], results[1][0][:3], strict=True))
    assert torch.equal(results[0][1], results[1][1])


def test_graph_replays_with_other_ids() -> None:
    ids, x = draw("cuda", 700, 8, 64), numbers("cuda", 700, 64, dtype=torch.bfloat16)

    def run() -> Tensor:
        found = routing.route(ids, 64, torch.bfloat16)
        return routing.unpermute(routing.permute(x, found), found)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for kind in ("absent", "one", "few"):
        ids.copy_(draw("cuda", 700, 8, 64, kind))
        graph.replay()
        assert torch.equal(y, run())


@pytest.mark.parametrize("slots", [40_000, 3_000_000])
def test_millions_of_slots(slots: int) -> None:
    ids = draw("cuda", slots // 8, 8, 512, "absent")
    found = routing.route(ids, 512, torch.bfloat16)
    sizes, order = expected(ids, 512)

    assert torch.equal(found.split_sizes.long(), sizes)
    assert torch.equal(found.slot_of_row.long(), order)
