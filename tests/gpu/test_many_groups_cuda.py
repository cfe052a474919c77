"""More groups and experts than one launch has a table for, up to 4096; needs the extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from checks import many_groups as checks
from checks.device import needs_hopper

from fusible.ops.kernels.doors import routing
from fusible.ops.kernels.problems.gemm import Layout

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]

LAYOUTS = list(Layout)


@pytest.mark.parametrize("groups", checks.GROUPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(layout: Layout, groups: int) -> None:
    checks.check_products("cuda", layout, groups)
    checks.check_products_with_all("cuda", layout, groups)


@pytest.mark.parametrize("groups", checks.GROUPS)
def test_sums_of_weight_gradients(groups: int) -> None:
    checks.check_sums_of_weight_gradients("cuda", groups)


@pytest.mark.parametrize("groups", [600, 1100])
def test_sorted_and_split(groups: int) -> None:
    checks.check_sorted_and_split("cuda", groups)


@pytest.mark.parametrize("groups", checks.GROUPS)
def test_activations(groups: int) -> None:
    checks.check_activations("cuda", groups)


@pytest.mark.parametrize("groups", checks.GROUPS)
def test_quantised(groups: int) -> None:
    checks.check_e4m3("cuda", groups)
    checks.check_packed("cuda", groups)
    checks.check_quantised_rows("cuda", groups)
    checks.check_quantised_weights("cuda", groups)


@pytest.mark.parametrize("groups", checks.GROUPS)
def test_low_rank(groups: int) -> None:
    checks.check_low_rank("cuda", groups)


@pytest.mark.parametrize("groups", checks.GROUPS)
def test_sums_of_groups(groups: int) -> None:
    checks.check_sums_of_groups("cuda", groups)


@pytest.mark.parametrize("groups", checks.GROUPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged(layout: Layout, groups: int) -> None:
    checks.check_ragged("cuda", layout, groups)


@pytest.mark.parametrize("kind", ["any", "absent", "one", "few"])
@pytest.mark.parametrize("slots", checks.SLOTS)
@pytest.mark.parametrize("groups", checks.GROUPS)
def test_routes(groups: int, slots: int, kind: str) -> None:
    """One block, several, and more slots than blocks have one round for."""
    for tokens in (3, 100, 40000):
        checks.check_routes("cuda", groups, slots, tokens, kind)


@pytest.mark.parametrize("slots", checks.SLOTS)
@pytest.mark.parametrize("groups", checks.GROUPS)
def test_routed_experts(groups: int, slots: int) -> None:
    checks.check_rows_go_and_come_back("cuda", groups, slots)
    checks.check_routed_experts("cuda", groups, slots, 70)


def test_a_graph_replays_with_other_ids() -> None:
    """Of all launches: windows, and routes of several blocks."""
    ids = torch.randint(0, 896, (300, 16), device="cuda")
    routing.route(ids, 896, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = routing.route(ids, 896, torch.bfloat16)
    ids.copy_(torch.randint(0, 896, (300, 16), device="cuda"))
    graph.replay()
    assert torch.equal(found.split_sizes.long(), torch.bincount(ids.view(-1), minlength=896))
