"""The kernels that quantise, on the CPU (tests/emulation), bit for bit against the reference."""

from __future__ import annotations

import pytest
import torch
from checks import quantize as checks
from emulation import build, harness

from fusible.ops.kernels.hopper import quantize
from fusible.ops.kernels.quantized_problem import QuantizeRows, QuantizeWeight

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_rows(sizes: list[int], power_of_two: bool) -> None:
    checks.check_rows("cpu", sizes, 272, power_of_two=power_of_two)


@pytest.mark.parametrize("want", ["rows", "columns"])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_one_copy(dtype: torch.dtype, want: str) -> None:
    """Of rows with a pitch, and groups whose sizes are int32."""
    checks.check_rows("cpu", checks.SIZES[0], 400, dtype, want=want, pitch=8, index=torch.int32)


def test_rows_of_more_groups_than_a_warp_has_lanes(emulation: harness.Emulation) -> None:
    with emulation.shuffled(1):
        checks.check_rows("cpu", [g % 4 for g in range(70)], 144, tail=129)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_every_amax(dtype: torch.dtype, power_of_two: bool) -> None:
    checks.check_every_amax_of_rows("cpu", dtype, power_of_two, slice(None))
    checks.check_every_amax_of_columns("cpu", dtype, power_of_two, slice(3, None, 8))


@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_every_value(dtype: torch.dtype) -> None:
    checks.check_every_value("cpu", dtype)


@pytest.mark.parametrize("asked", checks.WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [*checks.HALVES, torch.float32], ids=str)
def test_weight(dtype: torch.dtype, asked: dict[str, object]) -> None:
    checks.check_weight("cpu", dtype=dtype, **asked)  # type: ignore[arg-type]


def test_weights_of_more_experts_than_the_small_table_has() -> None:
    checks.check_weight("cpu", 70, 16, 16, separate=True)


def rows_problem(x: torch.Tensor) -> QuantizeRows:
    sizes, (tokens, features) = torch.tensor([x.shape[0]]), x.shape
    return QuantizeRows(x, sizes, True, checks.rows_copy(tokens, features, "cpu"), None)


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.ones(4, 32), "quantises bfloat16 or float16 rows, not torch.float32"),
        (torch.ones(4, 24).bfloat16(), "multiples of 16, got 24"),
        (torch.ones(32, 4).bfloat16().mT, "dense rows at multiples of 16 bytes"),
        (torch.ones(4, 33).bfloat16()[:, 1:], "dense rows at multiples of 16 bytes"),
    ],
    ids=["float32", "24 features", "strides", "address"],
)
def test_rows_that_are_refused(x: torch.Tensor, why: str) -> None:
    assert why in str(quantize.refusal(rows_problem(x)))


def test_copies_that_are_refused() -> None:
    problem = rows_problem(torch.ones(4, 32).bfloat16())
    assert quantize.refusal(problem) is None
    assert problem.rows is not None
    problem.rows = problem.rows._replace(scales=torch.ones(2, 4))
    assert quantize.refusal(problem) is None, "more memory than is needed"
    problem.rows = problem.rows._replace(scales=torch.ones(1, 8))
    assert "scales [1, 4] of torch.float32" in str(quantize.refusal(problem))
    problem.columns = checks.columns_copy(4, 2, 32, "cpu")
    problem.rows = None
    assert quantize.refusal(problem) is None
    problem.columns = problem.columns._replace(data=problem.columns.data.view(torch.uint8))
    assert "transposed bytes [1, 32, 128]" in str(quantize.refusal(problem))


def weight_problem(weight: torch.Tensor, halves: int = 1) -> QuantizeWeight:
    return QuantizeWeight(weight, halves, True, checks.weight_copy(*weight.shape, halves, True, "cpu"))


@pytest.mark.parametrize(
    ("weight", "halves", "why"),
    [
        (torch.ones(1, 32, 32).double(), 1, "quantises weights of 16 or 32 bits, not torch.float64"),
        (torch.ones(1, 24, 32), 1, "multiples of 16, got 24"),
        (torch.ones(1, 32, 24), 1, "multiples of 16, got 24"),
        (torch.ones(1, 48, 32), 2, "multiples of 16, got 24"),
        (torch.ones(1, 32, 64).mT, 2, "multiples of 128 of a weight that is stored transposed, got 32"),
        (torch.ones(1, 32, 66)[:, :, ::2], 1, "multiples of 16"),
        (torch.ones(1, 32, 64)[:, :, ::2], 1, "dense rows at multiples of 16 bytes"),
    ],
    ids=["float64", "24 rows", "24 columns", "halves of 24", "stored transposed", "33 columns", "strides"],
)
def test_weights_that_are_refused(weight: torch.Tensor, halves: int, why: str) -> None:
    assert why in str(quantize.refusal(weight_problem(weight, halves)))
