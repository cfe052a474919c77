"""Products with MXFP4 weights as they are stored against float64; needs an H100 or H200 and the built extension."""

from __future__ import annotations

import pytest
import torch
from checks import stored
from checks.device import skip_module_without_hopper
from checks.recipes import Kernels
from checks.stored import Case

from fusible.ops.kernels.problems.gemm import Layout

pytestmark = pytest.mark.cuda
skip_module_without_hopper()
each_layout = pytest.mark.parametrize("layout", [Layout.NT, Layout.NN], ids=lambda layout: layout.value)


@each_layout
def test_groups_of_any_sizes(layout: Layout) -> None:
    for n, k in [(8, 64), (136, 192), (5760, 2880), (2880, 2880)]:
        stored.check("cuda", Case(layout, sizes=(333, 0, 1000, 1, 250), n=n, k=k))
    stored.check("cuda", Case(layout, sizes=(1,) * 70, n=264, k=704, tail=0))
    stored.check("cuda", Case(layout, sizes=tuple(i * 7 % 331 for i in range(600)), n=72, k=320, index=torch.int64))


@each_layout
@pytest.mark.parametrize("rank", [8, 16, 24, 64])
def test_a_second_pair_is_added(layout: Layout, rank: int) -> None:
    stored.check("cuda", Case(layout, sizes=(333, 0, 1000, 16, 250), n=1216, k=704, rank=rank))
    stored.check("cuda", Case(layout, n=256, k=256, rank=rank))


def test_bias_and_factors_of_rows() -> None:
    sizes = (333, 0, 1000, 16, 250)
    stored.check("cuda", Case(Layout.NT, sizes=sizes, n=1216, k=704, bias=torch.bfloat16))
    stored.check("cuda", Case(Layout.NT, sizes=sizes, n=1216, k=704, bias=torch.float32, factors=True, rank=16))


@each_layout
def test_every_value_is_exact(layout: Layout) -> None:
    stored.check_every_value("cuda", layout)


@each_layout
@pytest.mark.parametrize("byte", [*stored.SCALES, 255])
def test_a_scale_reaches_its_own_values_alone(layout: Layout, byte: int) -> None:
    stored.check_scales("cuda", layout, byte)


@pytest.mark.hopper
def test_many_rows_of_experts_are_those_of_decoded_weights() -> None:
    stored.check_experts(Kernels("cuda"), "grouped_mm")
