"""Products of runs of groups by our kernels; needs the built extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from checks import runs as checks
from checks.device import needs_hopper

from fusible import NF4, Float8Weight, Int4
from fusible.ops.formats.weight_only import WeightOnly
from fusible.ops.kernels import Layout

pytestmark = [pytest.mark.cuda, needs_hopper]


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[9, 0, 700, 3, 0], [0, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
def test_products(layout: Layout, sizes: list[int], step: int) -> None:
    checks.check_product("cuda", layout, sizes, step)


def test_more_groups_than_a_launch_takes() -> None:
    checks.check_product("cuda", Layout.NT, [i % 3 for i in range(896)], 600)


@pytest.mark.parametrize("format", [Int4(), NF4(), Float8Weight("rows")], ids=repr)
def test_layers(format: WeightOnly) -> None:
    ids = torch.rand(200, 5, device="cuda").argsort(-1)[:, :2]
    checks.check_layer("cuda", format, 5, ids, 2 * 2 * 128 * 64)
    checks.check_linears("cuda", format, [40, 0, 1300, 30, 0], 2 * 2 * 128 * 64)
