"""The CUDA kernels that bring rows to experts and back, against plain PyTorch; needs the extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusible.ops import routing
from fusible.ops.kernels.hopper import gemm as hopper

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.device_refusal(torch.cuda.current_device()) is not None,
        reason="needs a Hopper GPU and the built extension",
    ),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [  # tokens, slots, experts
    *((0, 2, 4), (1, 1, 1), (1, 8, 128), (3, 4, 32), (64, 8, 128), (65, 3, 7), (31, 5, 512)),
    *((513, 8, 128), (1000, 7, 300), (2050, 6, 5), (4100, 2, 512)),
]


def draw(tokens: int, slots: int, experts: int, kind: str = "any", index: torch.dtype = torch.int64) -> Tensor:
    """Ids [tokens, slots]; "absent": half of them are of no expert; "one": all of one; "few": most experts empty."""
    generator = torch.Generator("cuda").manual_seed(tokens + slots)
    if kind == "one":
        return torch.full((tokens, slots), experts // 2, device="cuda", dtype=index)
    limit = {"any": experts, "few": min(2, experts), "absent": 2 * experts}[kind]
    ids = torch.randint(0, limit, (tokens, slots), generator=generator, device="cuda")
    return ids.clamp(max=experts).to(index)


def expected(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The sizes, and the order by a stable sort."""
    flat = ids.reshape(-1).long()
    return torch.bincount(flat, minlength=experts + 1)[:experts], torch.sort(flat, stable=True)[1]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("kind", ["any", "absent", "one", "few"])
@pytest.mark.parametrize(("tokens", "slots", "experts"), SHAPES)
def test_route_sorts_stably(tokens: int, slots: int, experts: int, kind: str) -> None:
    for index in (torch.int64, torch.int32):
        ids = draw(tokens, slots, experts, kind, index)
        weights = numbers(tokens, slots)
        found = routing.route(ids, experts, torch.bfloat16, weights)
        sizes, order = expected(ids, experts)

        assert found.own
        assert torch.equal(found.split_sizes.long(), sizes)
        assert int(found.every) == int(sizes.sum())
        assert torch.equal(found.order.long(), order)
        assert torch.equal(found.place.reshape(-1)[order].long(), torch.arange(tokens * slots, device="cuda"))
        assert torch.equal(found.scales, weights.reshape(-1)[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_route_brings_weights_of_any_type(dtype: torch.dtype) -> None:
    ids, weights = draw(33, 4, 8), numbers(33, 4, dtype=dtype)
    found = routing.route(ids, 8, torch.bfloat16, weights)

    assert torch.equal(found.scales, weights.reshape(-1)[found.order.long()].float())


def test_ids_that_lie_stay_inside() -> None:
    ids = torch.tensor([[-1, 2**40], [0, -(2**40)], [1, 3]], device="cuda")
    found = routing.route(ids, 2, torch.bfloat16)

    assert [*found.split_sizes.tolist(), int(found.every)] == [1, 1, 2]
    assert found.order.tolist() == [2, 4, 0, 1, 3, 5]


def move(tokens: int, slots: int, experts: int, columns: int, dtype: torch.dtype, kind: str) -> None:
    ids = draw(tokens, slots, experts, kind)
    found = routing.route(ids, experts, dtype)
    every, place = int(found.every), found.place.long()
    x = numbers(tokens, columns, dtype=dtype)
    truth = x[found.order.long() // slots]
    filled = routing.spread(x, found)
    assert torch.equal(filled[:every], truth[:every])
    assert not filled[every:].any()
    assert torch.equal(routing.spread(x, found, fill=False)[:every], truth[:every])

    rows = numbers(tokens * slots, columns, dtype=dtype)
    rows[every:] = torch.nan
    sums = torch.zeros(tokens, columns, device="cuda")
    for slot in range(slots):
        at = place[:, slot]
        sums += torch.where((at < every)[:, None], rows[at].float(), 0)
    assert torch.equal(routing.add(rows, found), sums.to(dtype))


@pytest.mark.parametrize("kind", ["any", "absent"])
@pytest.mark.parametrize("columns", [1, 5, 8, 264, 1032])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_and_come_back(dtype: torch.dtype, columns: int, kind: str) -> None:
    for slots in range(1, 9):
        move(37, slots, 12, columns, dtype, kind)


@pytest.mark.parametrize("kind", ["any", "absent"])
@pytest.mark.parametrize(("tokens", "slots", "experts"), SHAPES)
def test_rows_of_any_number(tokens: int, slots: int, experts: int, kind: str) -> None:
    move(tokens, slots, experts, 72, torch.bfloat16, kind)


def test_rows_with_a_pitch() -> None:
    found, x = routing.route(draw(9, 2, 4), 4, torch.bfloat16), numbers(9, 64, dtype=torch.bfloat16)
    for part in (x[:, 8:24], x[:, 3:20], x[:, ::2]):
        assert torch.equal(routing.spread(part, found), routing.spread(part.contiguous(), found))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_slots(dtype: torch.dtype) -> None:
    found, given = routing.route(draw(70, 3, 9, "absent"), 9, torch.bfloat16), numbers(210)
    given[int(found.every) :] = torch.nan
    place = found.place.long()

    expected = torch.where(place < int(found.every), given[place], 0).to(dtype)
    assert torch.equal(routing.by_slot(given, found, dtype), expected)


def test_twice_is_bitwise_the_same() -> None:
    ids, rows = draw(3000, 8, 64), numbers(24000, 72, dtype=torch.bfloat16)
    results = [(found := routing.route(ids, 64, torch.bfloat16), routing.add(rows, found)) for _ in range(2)]

    assert all(torch.equal(a, b) for a, b in zip(results[0][0][:3], results[1][0][:3], strict=True))
    assert torch.equal(results[0][1], results[1][1])


def test_graph_replays_with_other_ids() -> None:
    ids, x = draw(700, 8, 64), numbers(700, 64, dtype=torch.bfloat16)

    def run() -> Tensor:
        found = routing.route(ids, 64, torch.bfloat16)
        return routing.add(routing.spread(x, found), found)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for kind in ("absent", "one", "few"):
        ids.copy_(draw(700, 8, 64, kind))
        graph.replay()
        assert torch.equal(y, run())


@pytest.mark.parametrize("slots", [40_000, 3_000_000])
def test_millions_of_slots(slots: int) -> None:
    ids = draw(slots // 8, 8, 512, "absent")
    found = routing.route(ids, 512, torch.bfloat16)
    sizes, order = expected(ids, 512)

    assert torch.equal(found.split_sizes.long(), sizes)
    assert torch.equal(found.order.long(), order)
