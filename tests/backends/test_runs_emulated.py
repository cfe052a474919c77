"""Products of runs of groups by our kernels, on the CPU (tests/emulation)."""

from __future__ import annotations

import pytest
import torch
from checks import runs as checks
from emulation import build

from fusible import NF4, Float8Weight, Int4
from fusible.ops.formats.weight_only import WeightOnly
from fusible.ops.kernels import Layout
from fusible.ops.kernels.doors import decoding

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[9, 0, 70, 3, 0], [0, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
def test_products(layout: Layout, sizes: list[int], step: int) -> None:
    checks.check_product("cpu", layout, sizes, step)


def test_more_groups_than_a_launch_takes() -> None:
    checks.check_product("cpu", Layout.NT, [i % 3 for i in range(896)], 600, 64, 64)


@pytest.mark.parametrize(("features", "runs"), [(64, 4), (60, 1)])
def test_features_that_kernels_do_not_take_are_one_run(
    features: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's product of a run would read the split sizes on the host."""
    monkeypatch.setattr(decoding, "RUN_BYTES", 1)
    data = torch.empty(4, features, 32, dtype=torch.uint8)

    assert len(decoding.decoding_runs(data, 2, torch.empty(3, 64, dtype=torch.bfloat16))) == runs


@pytest.mark.parametrize("format", [Int4(), NF4(), Float8Weight("rows")], ids=repr)
def test_layers(format: WeightOnly) -> None:
    ids = torch.tensor([[0, 3], [3, 4], [4, 0], [3, 0], [0, 4], [4, 3]])  # experts 1 and 2 have no rows
    checks.check_layer("cpu", format, 5, ids, 2 * 2 * 128 * 64)


@pytest.mark.parametrize("format", [Int4(), NF4(), Float8Weight()], ids=repr)
def test_linears(format: WeightOnly) -> None:
    checks.check_linears("cpu", format, [40, 0, 13, 30, 0], 2 * 2 * 128 * 64)
