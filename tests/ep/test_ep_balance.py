"""``ep.balanced_order``: experts by load, so that ranks have about as many rows, and the model is the same function."""

from __future__ import annotations

import warnings
from itertools import permutations

import pytest
import torch

from fusible import Combine, Dispatch, GroupedLinear, Scale, Sequential, SwiGLU, ep


def busiest(loads: torch.Tensor, ranks: int) -> float:
    """The load of the busiest rank, in parts of the mean."""
    of_ranks = loads.view(ranks, -1).sum(1)
    return float(of_ranks.max() / of_ranks.mean())


@pytest.mark.parametrize(("experts", "ranks", "sigma"), [(128, 8, 0.6), (128, 4, 1.0)])
def test_ranks_have_about_equal_loads(experts: int, ranks: int, sigma: float) -> None:
    draw, found = torch.Generator().manual_seed(0), []
    for _ in range(40):
        loads = (sigma * torch.randn(experts, generator=draw)).exp()
        order = ep.balanced_order(loads, ranks)
        found.append([busiest(loads, ranks), busiest(loads[order], ranks)])

        assert order.sort().values.tolist() == list(range(experts))
    as_they_come, balanced = torch.tensor(found).mean(0).tolist()

    assert as_they_come > 1.2
    assert balanced < 1.02


def test_few_experts_are_nearly_as_good_as_the_best_order() -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(10):
        loads = torch.rand(6, generator=draw)
        best = min(busiest(loads[list(order)], 2) for order in permutations(range(6)))

        assert busiest(loads[ep.balanced_order(loads, 2)], 2) <= 4 / 3 * best


def test_equal_loads_and_none_give_an_order_that_is_always_the_same() -> None:
    assert ep.balanced_order([1, 1, 1, 1], 2).tolist() == [0, 2, 1, 3]
    assert ep.balanced_order([0.0, 0.0], 2).tolist() == [0, 1]
    assert ep.balanced_order(torch.tensor([3, 1, 2]), 1).tolist() == [0, 1, 2]


def test_loads_may_be_sums_of_probabilities_that_want_gradients() -> None:
    loads = torch.tensor([0.5, 0.25, 1.0, 0.25], requires_grad=True)
    with warnings.catch_warnings(action="error"):
        assert ep.balanced_order(loads, 2).tolist() == [2, 3, 0, 1]


def test_a_model_in_another_order_is_the_same_function() -> None:
    torch.manual_seed(0)
    router, up, down = torch.nn.Linear(16, 8, bias=False), GroupedLinear(8, 16, 64), GroupedLinear(8, 32, 16)
    layer = Sequential(Dispatch(8), up, SwiGLU(), Scale(), down, Combine())
    x = torch.randn(20, 16)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = router(x).softmax(-1).topk(2)
        return layer(x, top_k_index=ids, top_k_weights=weights), ids

    expected, ids = run()
    order = ep.balanced_order(torch.bincount(ids.flatten(), minlength=8), 4)
    with torch.no_grad():
        for parameter in (*router.parameters(), *layer.parameters()):
            parameter.copy_(parameter[order])
    y, moved = run()

    assert torch.equal(order[moved], ids)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    ("loads", "ranks", "why"),
    [
        ([1.0, float("nan")], 2, r"loads must be \[E\] finite numbers from 0 on, got \[1.0, nan\]"),
        ([1.0, -1.0], 2, r"loads must be \[E\] finite numbers from 0 on"),
        (torch.ones(2, 2), 2, r"loads must be \[E\] finite numbers from 0 on"),
        ([1.0, 1.0, 1.0], 2, "ranks must divide the 3 experts, got 2"),
        ([1.0, 1.0], 0, "ranks must divide the 2 experts, got 0"),
        ([1.0, 1.0], 1.0, "ranks must divide the 2 experts, got 1.0"),
    ],
)
def test_loads_and_ranks_that_are_wrong(loads: object, ranks: object, why: str) -> None:
    with pytest.raises(ValueError, match=f"balanced_order: {why}"):
        ep.balanced_order(loads, ranks)  # type: ignore[arg-type]
