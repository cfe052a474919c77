"""The kernels that quantise and dequantise at once, on the CPU (tests/emulation), bit for bit against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import fake_quantize as checks
from checks.quantize import HALVES
from emulation import build, harness

from fusible.ops.formats.copies import PackedFormat
from fusible.ops.kernels.hopper import fake_quantize
from fusible.ops.kernels.problems.fake_quantized import FakeQuantizeWeight

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]
by_format = pytest.mark.parametrize("format", checks.FORMATS, ids=lambda format: format.value)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_rows_of_mxfp8(sizes: list[int], dtype: torch.dtype) -> None:
    checks.check_rows("cpu", PackedFormat.MXFP8, sizes, 272, dtype, finite=False)


@pytest.mark.parametrize("rounding", checks.ROUNDINGS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_rows_of_nvfp4(sizes: list[int], dtype: torch.dtype, rounding: dict[str, Any]) -> None:
    checks.check_rows("cpu", PackedFormat.NVFP4, sizes, 144, dtype, **rounding)


@by_format
@pytest.mark.parametrize("want", ["rows", "columns"])
def test_one_copy(format: PackedFormat, want: str) -> None:
    """Rows with a pitch, and int32 group sizes."""
    options: dict[str, Any] = {"want": want, "pitch": 8, "index": torch.int32}
    checks.check_rows("cpu", format, checks.SIZES[0], 400, **options)


def test_groups_with_values_that_are_not_finite() -> None:
    for is_transformed in (False, True):
        options: dict[str, Any] = {"finite": False, "is_transformed": is_transformed}
        checks.check_rows("cpu", PackedFormat.NVFP4, [3, 2, 40, 8], 80, **options)


@by_format
def test_rows_of_more_groups_than_a_warp_has_lanes(emulation: harness.Emulation, format: PackedFormat) -> None:
    with emulation.shuffled(1):
        checks.check_rows("cpu", format, [g % 4 for g in range(70)], 144, tail=129)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_amax(dtype: torch.dtype) -> None:
    checks.check_every_amax("cpu", PackedFormat.MXFP8, dtype, slice(3, None, 8))
    checks.check_every_amax("cpu", PackedFormat.NVFP4, dtype, slice(5, None, 256))


@by_format
@pytest.mark.parametrize("want", ["rows and columns", "rows", "columns"])
def test_gathered_rows(format: PackedFormat, want: str) -> None:
    checks.check_gathered_rows("cpu", format, 70, 3, 144, want)


@by_format
@pytest.mark.parametrize("asked", checks.WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_weight(format: PackedFormat, dtype: torch.dtype, asked: dict[str, Any]) -> None:
    checks.check_weight("cpu", format, dtype=dtype, **asked)
    checks.check_weight("cpu", format, dtype=dtype, finite=False, **asked)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (torch.ones(1, 32, 32).double(), "quantises weights of 16 or 32 bits, not torch.float64"),
        (torch.ones(1, 32, 24), "multiples of 16, got 24"),
        (torch.ones(1, 32, 64).mT, "dense rows at multiples of 16 bytes"),
    ],
    ids=["float64", "24 columns", "stored transposed"],
)
def test_weights_that_are_refused(weight: torch.Tensor, why: str) -> None:
    rows = checks.new_values(*weight.shape, device="cpu")
    assert why in str(fake_quantize.refusal(FakeQuantizeWeight(weight, PackedFormat.MXFP8, rows, None)))


def test_rows_that_are_refused() -> None:
    x, sizes = torch.ones(4, 32).bfloat16(), torch.tensor([4])
    problem = checks.rows_problem("cpu", PackedFormat.NVFP4, x, sizes, "columns")
    assert fake_quantize.refusal(problem) is None
    problem.x = x.float()
    assert "quantises bfloat16 or float16 rows, not torch.float32" in str(fake_quantize.refusal(problem))
