"""More groups and experts than one launch has a table for, on the CPU (tests/emulation); `cuda` has larger ones."""

from __future__ import annotations

import pytest
import torch
from checks import many_groups as checks
from emulation import build

from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.problems.gemm import Layout

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]

LAYOUTS = list(Layout)


@pytest.mark.parametrize("groups", checks.GROUPS)
@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
def test_products(layout: Layout, groups: int) -> None:
    checks.check_products("cpu", layout, groups)


@pytest.mark.parametrize("groups", [512, 513, 600])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_with_all(layout: Layout, groups: int) -> None:
    checks.check_products_with_all("cpu", layout, groups)


@pytest.mark.parametrize("groups", [513, 896])
def test_sums_of_weight_gradients(groups: int) -> None:
    checks.check_sums_of_weight_gradients("cpu", groups)


def test_sorted_and_split() -> None:
    checks.check_sorted_and_split("cpu", 600)


@pytest.mark.parametrize("groups", [512, 513, 896])
def test_activations(groups: int) -> None:
    checks.check_activations("cpu", groups)


@pytest.mark.parametrize("groups", [512, 600])
def test_e4m3(groups: int) -> None:
    checks.check_e4m3("cpu", groups)


def test_packed() -> None:
    checks.check_packed("cpu", 600)


@pytest.mark.parametrize("groups", [512, 513, 2048])
def test_low_rank(groups: int) -> None:
    checks.check_low_rank("cpu", groups)


def test_quantised_weights() -> None:
    checks.check_quantised_weights("cpu", 520)


@pytest.mark.parametrize("groups", [512, 513, 600])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged(layout: Layout, groups: int) -> None:
    checks.check_ragged("cpu", layout, groups)


@pytest.mark.parametrize("slots", checks.SLOTS)
@pytest.mark.parametrize("groups", checks.GROUPS)
def test_routes(groups: int, slots: int) -> None:
    """One block, and several."""
    for tokens in (3, 100):
        checks.check_routes("cpu", groups, slots, tokens)


@pytest.mark.parametrize("kind", ["any", "one", "few"])
def test_routes_of_many_blocks(kind: str) -> None:
    """More blocks than have counters of their own, where there are 4096 experts: 255."""
    checks.check_routes("cpu", 896, 16, 1300, kind)


def test_rows_go_and_come_back() -> None:
    for slots in checks.SLOTS:
        checks.check_rows_go_and_come_back("cpu", 896, slots)


@pytest.mark.parametrize("groups", [512, 513, 896])
def test_routed_experts(groups: int) -> None:
    checks.check_routed_experts("cpu", groups, 16, 9)


def test_more_groups_than_that_are_refused() -> None:
    x, sizes = torch.empty(1, 8, dtype=torch.bfloat16), torch.empty(4097, dtype=torch.int32)
    weight = torch.empty(4097, 8, 8, dtype=torch.bfloat16)
    problem = hopper.GroupedGemm(Layout.NT, x, weight, sizes, torch.empty_like(x))
    assert hopper.refusal(problem) == "takes 1 to 4096 groups, got 4097"
