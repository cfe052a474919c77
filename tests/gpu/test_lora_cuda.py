"""Routed experts with low-rank adapters on a GPU, and the products with a second pair of operands that they run."""

from __future__ import annotations

import pytest
import torch
from checks import fused, gemm
from checks.device import needs_hopper
from checks.lora import check_trains

from fusible.ops.kernels import extension
from fusible.ops.kernels.problems.gemm import Layout

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]

SIZES = (131, 0, 77, 304, 1, 512, 700, 64)


@pytest.mark.parametrize("ranks", [(8, 16), (8, 0), (0, 8), (64, 8), (8, 96)])
def test_trains(ranks: tuple[int, int]) -> None:
    check_trains("cuda", ranks)


@pytest.mark.parametrize("ranks", [(1, 8), (3, 5)])
def test_rows_that_our_kernels_do_not_take(ranks: tuple[int, int]) -> None:
    """Their products run elsewhere, and what they give is added to that of the weight."""
    check_trains("cuda", ranks, strict=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_routing_weights_of_any_type(dtype: torch.dtype) -> None:
    check_trains("cuda", (8, 16), strict=False, weights_dtype=dtype)


@pytest.mark.parametrize("rank", [8, 16, 64, 96])
@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
def test_second_pairs(layout: Layout, rank: int) -> None:
    for variant in (-1, *extension.library().PAIR_VARIANTS):
        gemm.check("cuda", gemm.Case(layout, SIZES, k=1032, n=776, rank=rank, pitch=24, variant=variant))
    case = gemm.Case(layout, SIZES, dtype=torch.float16, rank=rank, separate=True, bias=torch.float32, row_scale=True)
    gemm.check("cuda", case, alpha="groups")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", fused.SOME)
def test_second_pairs_and_epilogues(name: str, transposed: bool) -> None:
    for rank, bias in ((16, None), (96, torch.float32)):
        case = fused.Case(fused.SPECS[name], SIZES, 520, 768, rank=rank, bias=bias, transposed=transposed)
        fused.check_forward("cuda", case)
        fused.check_backward("cuda", case)
