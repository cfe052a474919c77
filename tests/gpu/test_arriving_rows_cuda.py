"""Rows that another kernel brings while a product runs, on a GPU: the buffers of both ranks are in its memory."""

from __future__ import annotations

import pytest
import torch
from ep_arriving_cases import BF16, SLOTS, Exchange, check_slots, multiply, output_of, weights_of

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("blocks", [1, 8, 40])
@pytest.mark.parametrize(("tokens", "experts", "columns", "hidden"), [(2048, 16, 2048, 768), (300, 64, 1032, 64)])
def test_no_row_is_read_before_it_is_there(blocks: int, tokens: int, experts: int, columns: int, hidden: int) -> None:
    """Rows are NaN at first. The product is launched behind the kernel that brings them, and begins beside it."""
    problem = Exchange.random(0, 70, tokens, experts, columns)
    rows_there, kept, problem = problem.expected().cuda(), int(problem.sizes.sum()), problem.to("cuda")
    weights = weights_of(problem, hidden)
    expected = multiply(problem, weights, rows_there, output_of(problem, weights), None)[:kept]
    assert not expected.isnan().any()

    for _ in range(50):
        rows = torch.full((problem.capacity, columns), float("nan"), dtype=BF16, device="cuda")
        arrived, out = problem.counters(), output_of(problem, weights)
        torch.cuda.synchronize()
        used = problem.pull_blocks(rows, arrived, blocks)
        out = multiply(problem, weights, rows, out, arrived, problem.pieces)
        torch.cuda.synchronize()
        del used
        assert torch.equal(out[:kept], expected)
        assert torch.equal(rows, rows_there)


@pytest.mark.parametrize("hidden", [64, 768])
@pytest.mark.parametrize(
    ("tokens", "experts", "columns", "bias", "spare"),
    [*SLOTS, (4096, 16, 2048, False, 0), (4096, 16, 2048, True, 70), (1024, 64, 1032, False, -50)],
)
def test_rows_of_a_product_go_to_their_slots(
    tokens: int, experts: int, columns: int, bias: bool, spare: int, hidden: int
) -> None:
    check_slots(Exchange.random(0, spare, tokens, experts, hidden).to("cuda"), columns, bias)
