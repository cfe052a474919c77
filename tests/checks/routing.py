"""Checks of the kernels that bring rows to experts and back, against plain PyTorch, on a GPU or its emulation."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.ops.kernels.doors import routing

SHAPES = [  # tokens, slots, experts
    *((0, 2, 4), (1, 1, 1), (1, 8, 128), (3, 4, 32), (64, 8, 128), (65, 3, 7), (31, 5, 512)),
    *((513, 8, 128), (1000, 7, 300), (2050, 6, 5), (4100, 2, 512)),
]


def draw(
    device: str, tokens: int, slots: int, experts: int, kind: str = "any", index: torch.dtype = torch.int64
) -> Tensor:
    """Ids [tokens, slots]; "absent": half of them are of no expert; "one": all of one; "few": most experts empty."""
    generator = torch.Generator(device).manual_seed(tokens + slots)
    if kind == "one":
        return torch.full((tokens, slots), experts // 2, device=device, dtype=index)
    limit = {"any": experts, "few": min(2, experts), "absent": 2 * experts}[kind]
    ids = torch.randint(0, limit, (tokens, slots), generator=generator, device=device)
    return ids.clamp(max=experts).to(index)


def expected(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The sizes, and the order by a stable sort."""
    flat = ids.reshape(-1).long()
    return torch.bincount(flat, minlength=experts + 1)[:experts], torch.sort(flat, stable=True)[1]


def numbers(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def check_route_sorts_stably(device: str, tokens: int, slots: int, experts: int, kind: str) -> None:
    for index in (torch.int64, torch.int32):
        ids = draw(device, tokens, slots, experts, kind, index)
        weights = numbers(device, tokens, slots)
        found = routing.route(ids, experts, torch.bfloat16, weights)
        sizes, order = expected(ids, experts)

        assert found.is_native
        assert torch.equal(found.split_sizes.long(), sizes)
        assert int(found.num_rows) == int(sizes.sum())
        assert torch.equal(found.slot_of_row.long(), order)
        assert torch.equal(found.row_of_slot.reshape(-1)[order].long(), torch.arange(tokens * slots, device=device))
        assert torch.equal(found.scales, weights.reshape(-1)[order])


def check_route_brings_weights_of_any_type(device: str, dtype: torch.dtype) -> None:
    ids, weights = draw(device, 33, 4, 8), numbers(device, 33, 4, dtype=dtype)
    found = routing.route(ids, 8, torch.bfloat16, weights)

    scales = weights.reshape(-1)[found.slot_of_row.long()].to(torch.promote_types(dtype, torch.float32))
    assert torch.equal(routing.scales_of(found, weights), scales)


def check_ids_that_lie_stay_inside(device: str) -> None:
    ids = torch.tensor([[-1, 2**40], [0, -(2**40)], [1, 3]], device=device)
    found = routing.route(ids, 2, torch.bfloat16)

    assert [*found.split_sizes.tolist(), int(found.num_rows)] == [1, 1, 2]
    assert found.slot_of_row.tolist() == [2, 4, 0, 1, 3, 5]


def check_rows_go_and_come_back(
    device: str, tokens: int, slots: int, experts: int, columns: int, dtype: torch.dtype, kind: str
) -> None:
    ids = draw(device, tokens, slots, experts, kind)
    found = routing.route(ids, experts, dtype)
    every, place = int(found.num_rows), found.row_of_slot.long()
    x = numbers(device, tokens, columns, dtype=dtype)
    truth = x[found.slot_of_row.long() // slots]
    filled = routing.permute(x, found)
    assert torch.equal(filled[:every], truth[:every])
    assert not filled[every:].any()
    assert torch.equal(routing.permute(x, found, fill=False)[:every], truth[:every])

    rows = numbers(device, tokens * slots, columns, dtype=dtype)
    rows[every:] = torch.nan
    sums = torch.zeros(tokens, columns, device=device)
    for slot in range(slots):
        at = place[:, slot]
        sums += torch.where((at < every)[:, None], rows[at].float(), 0)
    assert torch.equal(routing.unpermute(rows, found), sums.to(dtype))


def check_rows_with_a_pitch(device: str) -> None:
    found, x = routing.route(draw(device, 9, 2, 4), 4, torch.bfloat16), numbers(device, 9, 64, dtype=torch.bfloat16)
    for part in (x[:, 8:24], x[:, 3:20], x[:, ::2]):
        assert torch.equal(routing.permute(part, found), routing.permute(part.contiguous(), found))


def check_numbers_of_slots(device: str, dtype: torch.dtype) -> None:
    found, given = routing.route(draw(device, 70, 3, 9, "absent"), 9, torch.bfloat16), numbers(device, 210)
    given[int(found.num_rows) :] = torch.nan
    place = found.row_of_slot.long()

    expected = torch.where(place < int(found.num_rows), given[place], 0)
    assert torch.equal(routing.by_slot(given, found, dtype), expected.to(dtype))
    assert torch.equal(routing.by_slot(given, found, torch.float64), expected.double())
    assert torch.equal(routing.by_slot(given.double(), found, dtype), expected.to(dtype))
