"""Products with MXFP4 weights as they are stored, on the CPU (tests/emulation): the checks of a GPU's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import stored
from checks.stored import Case
from emulation import build

from fusible.ops.kernels.doors import stored as door
from fusible.ops.kernels.hopper import stored_gemm as hopper
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.kernels.problems.quantized import StoredGemm

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]
each_layout = pytest.mark.parametrize("layout", [Layout.NT, Layout.NN], ids=lambda layout: layout.value)


@each_layout
def test_groups_of_any_sizes(layout: Layout) -> None:
    stored.check("cpu", Case(layout))
    stored.check("cpu", Case(layout, sizes=(1, 1, 1), n=8, k=64, tail=0))
    stored.check("cpu", Case(layout, sizes=(300, 0, 256), n=200, k=320, tail=33, index=torch.int64))
    n, k = (72, 320) if layout is Layout.NT else (320, 64)  # a block of the cluster without a tile, many stages
    stored.check("cpu", Case(layout, n=n, k=k))


@each_layout
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_a_second_pair_is_added(layout: Layout, rank: int) -> None:
    stored.check("cpu", Case(layout, rank=rank))
    stored.check("cpu", Case(layout, n=256, k=256, rank=rank))  # behind whole runs of stages whose scales are fetched


def test_bias_and_factors_of_rows() -> None:
    stored.check("cpu", Case(Layout.NT, bias=torch.bfloat16))
    stored.check("cpu", Case(Layout.NT, bias=torch.float32, factors=True, rank=16))


@each_layout
def test_every_value_is_exact(layout: Layout) -> None:
    stored.check_every_value("cpu", layout)


@each_layout
@pytest.mark.parametrize("byte", [*stored.SCALES[::3], 137, 255])
def test_a_scale_reaches_its_own_values_alone(layout: Layout, byte: int) -> None:
    stored.check_scales("cpu", layout, byte)


@each_layout
def test_threads_in_any_order(layout: Layout, emulation: Any) -> None:
    for seed in (1, 2):
        with emulation.shuffled(seed):
            stored.check("cpu", Case(layout, rank=16))


@each_layout
def test_no_rows(layout: Layout) -> None:
    hopper.run(stored.make("cpu", Case(layout, sizes=(0, 0), tail=0)))
    problem = stored.make("cpu", Case(layout, sizes=(0, 0), tail=4))
    hopper.run(StoredGemm(replace(problem.product, fresh=True), problem.scales))
    assert not problem.product.out.any()  # type: ignore[union-attr]


def test_what_is_refused() -> None:
    problem = stored.make("cpu", Case(Layout.NT, rank=72))
    assert "rank 64 at most, got 72" in (hopper.refusal(problem) or "")
    problem = stored.make("cpu", Case(Layout.NN))
    assert hopper.refusal(problem) is None
    product, bias = problem.product, torch.zeros(4, 192)
    refused = {
        "in a forward alone": replace(product, bias=bias),
        "gives bfloat16": replace(product, out=product.out.float()),  # type: ignore[union-attr]
        "multiplies bfloat16": replace(product, a=product.a.half()),
        "dense weights": replace(product, b=product.b[:, ::17]),  # type: ignore[call-overload]
        "multiples of 64": replace(product, b=product.b[..., :48].contiguous()),  # type: ignore[call-overload]
    }
    for words, other in refused.items():
        assert words in (hopper.refusal(StoredGemm(other, problem.scales)) or ""), words


def test_many_rows_are_decoded_before() -> None:
    data = torch.empty(3, 8, 32, dtype=torch.uint8)
    assert door.rows_refusal(torch.empty(3 * 512, 64), data) is None
    assert "at most 512 rows per group, got 513" in (door.rows_refusal(torch.empty(3 * 513, 64), data) or "")
