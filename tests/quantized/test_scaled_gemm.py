"""Products of e4m3 operands on the CPU (tests/emulation), whose accumulators keep what those of Hopper keep.

The checks are those of a GPU (test_scaled_gemm_cuda.py), on small problems.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import scaled
from checks.accumulator_probe import accumulated
from checks.scaled import Case, WgradCase
from emulation import build

from fusible.ops.ep import float8_rows
from fusible.ops.formats.copies import Rows
from fusible.ops.kernels.doors.quantized import quantize_rows
from fusible.ops.kernels.hopper import scaled_gemm as hopper

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]

RAGGED = (131, 0, 77, 1, 64)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WGRAD_TILES = range(2)


def check(sizes: tuple[int, ...] = RAGGED, **asked: object) -> None:
    scaled.check_gemm("cpu", replace(Case(sizes), **asked))  # type: ignore[arg-type]


def check_wgrad(sizes: tuple[int, ...] = RAGGED, **asked: object) -> None:
    scaled.check_wgrad("cpu", replace(WgradCase(sizes), **asked))  # type: ignore[arg-type]


def test_shapes() -> None:
    """Depth and width that no block divides; odd rows of tiles, more of them than the depth of the queue."""
    check()
    check((300, 0, 129), k=144, n=520, tail=0)
    check((300, 0, 129), k=16, n=8, tail=1)


def test_rows_with_other_bytes_between_them() -> None:
    """As those of tokens that travelled with their scales."""
    check(gap=16)
    check((300, 0, 129), k=144, n=520, tail=0, gap=48)


def test_rows_that_travelled_give_the_bits_of_those_that_did_not() -> None:
    problem, _, _ = scaled.make_gemm("cpu", Case(RAGGED))
    x = torch.randn(problem.rows, 272).bfloat16() * torch.exp2(torch.arange(272) // 128 * 6.0)
    here = quantize_rows(x.bfloat16(), problem.split_sizes, power_of_two=True).rows
    products = []
    for rows in (here, float8_rows.arrived(float8_rows.packed(x.bfloat16()), 272).rows):
        each = replace(problem, a=rows, out=torch.zeros_like(problem.out))
        assert hopper._gemm_refusal(each) is None
        hopper.launch_gemm(each)
        products.append(each.out)

    assert products[0].any()
    assert torch.equal(products[0], products[1])


def test_consumers_without_rows() -> None:
    """The depth has more blocks than there are stages."""
    check((30, 300, 0, 129, 200), k=784, n=136)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_with_bias_and_factors(dtype: torch.dtype) -> None:
    check(out_dtype=dtype, bias=torch.bfloat16, factors=True)
    check(out_dtype=dtype, n=400, k=128, index=torch.int64)


def test_scales_that_lie_transposed() -> None:
    check(n=648, k=272, transposed_scales=True)
    check(n=136, k=656, transposed_scales=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_that_restart_at_the_second_half(dtype: torch.dtype) -> None:
    check(halves=2, n=400, out_dtype=dtype)
    check(halves=2, n=656, out_dtype=dtype, bias=torch.float32, factors=True)
    check(halves=2, n=512, out_dtype=dtype)


@pytest.mark.parametrize("fast", [False, True])
def test_whole_rows_with_one_scale(fast: bool) -> None:
    check(whole_rows=True, fast=fast)
    check((300, 0, 129), k=144, n=520, tail=0, whole_rows=True, fast=fast)
    check((300, 0, 129), k=16, n=8, tail=1, whole_rows=True, fast=fast)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_results_of_whole_rows(dtype: torch.dtype, fast: bool) -> None:
    check(out_dtype=dtype, bias=torch.bfloat16, factors=True, whole_rows=True, fast=fast)
    check((300, 1, 129), out_dtype=dtype, n=520, k=128, index=torch.int64, whole_rows=True, one_scale=True, fast=fast)


@pytest.mark.parametrize("whole_rows", [False, True])
def test_sums_of_equal_signs_keep_their_bits(whole_rows: bool) -> None:
    scaled.check_same_sign("cpu", whole_rows=whole_rows)


def test_rows_of_other_groups_do_not_matter() -> None:
    scaled.check_poisoned_rows("cpu")
    scaled.check_poisoned_rows("cpu", whole_rows=True)
    scaled.check_poisoned_rows("cpu", whole_rows=True, fast=True)
    scaled.check_groups_alone("cpu")


@pytest.mark.parametrize("variant", WGRAD_TILES)
def test_weight_gradients(variant: int) -> None:
    check_wgrad(variant=variant)
    check_wgrad((0, 0, 300), m=136, n=648, tail=0, variant=variant)
    check_wgrad((0, 130), m=8, n=8, tail=500, variant=variant)


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_in_fp32(accumulate: bool) -> None:
    check_wgrad(out_dtype=torch.float32, accumulate=accumulate)
    check_wgrad((400, 0, 900), out_dtype=torch.float32, accumulate=accumulate, separate=True)


def test_weight_gradients_of_all_depths() -> None:
    """Each end of a block's steps of 32 tokens."""
    check_wgrad((1, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 160, 161), m=72, n=72, out_dtype=torch.float16)


def test_blocks_of_other_groups_do_not_matter() -> None:
    scaled.check_poisoned_group("cpu")


def test_no_rows() -> None:
    problem, _, _ = scaled.make_gemm("cpu", Case((0, 0), tail=0))
    hopper.launch_gemm(problem)
    hopper.launch_gemm(scaled.make_gemm("cpu", Case((0, 0), tail=0, whole_rows=True))[0])
    wgrad, _, _ = scaled.make_wgrad("cpu", WgradCase((0, 0), tail=0))
    hopper.launch_wgrad(wgrad)
    assert not wgrad.out.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("whole_rows", [False, True])
def test_new_results_have_zeros_in_their_tails(whole_rows: bool) -> None:
    problem, _, _ = scaled.make_gemm("cpu", Case((70, 3), tail=9, whole_rows=whole_rows))
    problem.fresh = True
    hopper.launch_gemm(problem)
    assert not problem.out[73:].any()


@pytest.mark.parametrize(
    ("first", "then", "result"),
    [
        ([(448, 448)], [(8, 1)], 200704.0),
        ([(448, 448)], [(2, 8)], 200720.0),
        ([(448, 448)], [(-8, 1)], 200704.0),
        ([(1, 1)], [(2**-7, 2**-7)], 1.0),
        ([(1, 1)], [(2**-7, 2**-6)], 1.0001220703125),
    ],
)
def test_accumulators_keep_13_fraction_bits(
    first: list[tuple[float, float]], then: list[tuple[float, float]], result: float
) -> None:
    assert accumulated("cpu", first, then) == result


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"k": 264}, "depth that is a multiple of 16"),
        ({"n": 260}, "columns of 8"),
        ({"halves": 2, "n": 264}, "halves of the columns that are multiples of 8"),
    ],
)
def test_shapes_that_are_refused(asked: dict[str, int], reason: str) -> None:
    problem, _, _ = scaled.make_gemm("cpu", replace(Case((3,)), **asked))  # type: ignore[arg-type]
    assert reason in (hopper.refusal(problem) or "")


def test_operands_that_are_refused() -> None:
    problem, _, _ = scaled.make_gemm("cpu", Case((30,)))
    assert hopper.refusal(problem) is None
    assert "scales of rows of shape" in (hopper.refusal(replace(problem, a=_with_scales(problem.a, 1))) or "")
    assert "scales of weights of shape" in (hopper.refusal(replace(problem, weight_scales=torch.ones(1, 1, 1))) or "")
    assert "float8_e4m3fn operands" in (hopper.refusal(replace(problem, weight=problem.weight.float())) or "")
    assert "aligned to 16 bytes" in (hopper.refusal(replace(problem, out=problem.out[:, 1:])) or "")
    whole, _, _ = scaled.make_gemm("cpu", Case((30,), whole_rows=True))
    assert hopper.refusal(whole) is None
    assert "scales of rows of shape" in (hopper.refusal(replace(whole, a=whole.a._replace(scales=torch.ones(3)))) or "")
    blocks = replace(whole, weight_scales=problem.weight_scales)
    assert "scales of weights of shape" in (hopper.refusal(blocks) or "")
    wgrad, _, _ = scaled.make_wgrad("cpu", WgradCase((30,)))
    assert hopper.refusal(wgrad) is None
    assert "accumulates in float32" in (hopper.refusal(replace(wgrad, accumulate=True)) or "")
    assert "blocks of a" in (hopper.refusal(replace(wgrad, rows=1000)) or "")


def _with_scales(rows: Rows, more: int) -> Rows:
    return rows._replace(scales=rows.scales.new_ones(rows.scales.shape[0] + more, rows.scales.shape[1]))
