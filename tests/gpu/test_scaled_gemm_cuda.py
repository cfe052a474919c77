"""Products of e4m3 operands against float64, one launch at a time; needs an H100 or H200 and the built extension."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from checks import scaled
from checks.accumulator_probe import accumulated
from checks.device import skip_module_without_hopper
from checks.scaled import Case, WgradCase, check_gemm, check_wgrad

pytestmark = pytest.mark.cuda
skip_module_without_hopper()

RAGGED = (131, 0, 77, 304, 1, 512)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WGRAD_TILES = [-1, 0, 1]


def test_shapes() -> None:
    """Depth and width that no block divides."""
    for k, n in [(16, 8), (128, 128), (144, 136), (272, 264), (128, 768), (528, 392), (2064, 1536), (2880, 200)]:
        check_gemm("cuda", Case(RAGGED, k=k, n=n))


def test_consumers_without_rows() -> None:
    """The depth has more blocks than there are stages."""
    check_gemm("cuda", Case((30, 300, 0, 129, 200, 4), k=2048, n=1544))


def test_one_group_of_every_size() -> None:
    for size in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 1000, 2500):
        check_gemm("cuda", Case((size,), k=272, n=520, tail=size % 3))


@pytest.mark.parametrize("variant", WGRAD_TILES)
def test_weight_gradients_of_one_group_of_every_size(variant: int) -> None:
    for size in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 1000, 2500):
        check_wgrad("cuda", WgradCase((size,), tail=size % 3, variant=variant))


@pytest.mark.parametrize(("dtype", "factors"), list(product(DTYPES, [False, True])), ids=str)
def test_results(dtype: torch.dtype, factors: bool) -> None:
    bias = torch.bfloat16 if factors else None
    check_gemm("cuda", Case(RAGGED, k=1040, n=1544, out_dtype=dtype, bias=bias, factors=factors))
    check_gemm("cuda", Case(RAGGED, k=400, n=720, out_dtype=dtype, bias=bias, factors=factors, halves=2))
    check_gemm("cuda", Case(RAGGED, k=400, n=720, out_dtype=dtype, factors=factors, transposed_scales=True))


@pytest.mark.parametrize("fast", [False, True])
def test_whole_rows_with_one_scale(fast: bool) -> None:
    for k, n in [(16, 8), (128, 128), (144, 136), (272, 264), (528, 392), (2064, 1536), (2880, 200)]:
        check_gemm("cuda", Case(RAGGED, k=k, n=n, whole_rows=True, fast=fast and k < 500))
    for size in (1, 2, 64, 65, 127, 128, 129, 193, 257, 1000):
        check_gemm("cuda", Case((size,), n=520, tail=size % 3, whole_rows=True, fast=fast))


@pytest.mark.parametrize(("dtype", "factors"), list(product(DTYPES, [False, True])), ids=str)
def test_results_of_whole_rows(dtype: torch.dtype, factors: bool) -> None:
    bias = torch.bfloat16 if factors else None
    case = Case(RAGGED, k=1040, n=1544, out_dtype=dtype, bias=bias, factors=factors, whole_rows=True)
    check_gemm("cuda", case)
    check_gemm("cuda", replace(case, k=272, one_scale=True, fast=True))
    check_gemm("cuda", replace(case, sizes=(1,) * 70, k=144, n=136, tail=0))
    check_gemm("cuda", replace(case, sizes=tuple(i * 37 % 131 for i in range(512)), k=144, n=136))


@pytest.mark.parametrize("variant", WGRAD_TILES)
def test_weight_gradients(variant: int) -> None:
    for m, n in [(8, 8), (72, 136), (264, 200), (768, 2048), (2880, 520)]:
        check_wgrad("cuda", WgradCase(RAGGED, m=m, n=n, variant=variant))
    check_wgrad("cuda", WgradCase((1, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 160, 161), variant=variant))


@pytest.mark.parametrize(
    ("dtype", "accumulate", "separate"), list(product(DTYPES, [False, True], [False, True])), ids=str
)
def test_weight_gradients_of_every_kind(dtype: torch.dtype, accumulate: bool, separate: bool) -> None:
    if accumulate and dtype != torch.float32:
        pytest.skip("sums are in fp32 alone")
    for sizes in [RAGGED, (3000, 0, 900)]:
        check_wgrad("cuda", WgradCase(sizes, m=776, n=1032, out_dtype=dtype, accumulate=accumulate, separate=separate))


def test_many_groups() -> None:
    sizes = tuple(i * 37 % 131 for i in range(512))
    check_gemm("cuda", Case(sizes, k=144, n=136))
    check_wgrad("cuda", WgradCase(sizes, m=136, n=72))


def test_neighbours_do_not_matter() -> None:
    scaled.check_poisoned_rows("cuda")
    scaled.check_groups_alone("cuda")


@pytest.mark.parametrize("fast", [False, True])
def test_neighbours_do_not_matter_to_whole_rows(fast: bool) -> None:
    scaled.check_poisoned_rows("cuda", whole_rows=True, fast=fast)


@pytest.mark.parametrize("variant", WGRAD_TILES)
def test_other_groups_do_not_matter_to_weight_gradients(variant: int) -> None:
    scaled.check_poisoned_group("cuda", variant)


@pytest.mark.parametrize("whole_rows", [False, True])
def test_sums_of_equal_signs_keep_their_bits(whole_rows: bool) -> None:
    scaled.check_same_sign("cuda", whole_rows)


def test_accumulators_keep_13_fraction_bits() -> None:
    """The hardware agrees with the emulation's model."""
    first = [(448.0, 448.0)]
    found = [accumulated("cuda", first, [(x, y)]) for x, y in [(8, 1), (2, 8), (-8, 1)]]
    assert found == [200704.0, 200720.0, 200704.0]
    assert accumulated("cuda", [(1, 1)], [(2**-7, 2**-7)]) == 1.0
    assert accumulated("cuda", [(1, 1)], [(2**-7, 2**-6)]) == 1.0001220703125
