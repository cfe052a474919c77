"""The kernels that quantise, on the CPU (tests/emulation), bit for bit against the reference."""

from __future__ import annotations

import pytest
import torch
from checks import quantize as checks
from checks import quantize_whole as whole
from emulation import build, harness

from fusible.ops.formats import reference
from fusible.ops.formats.copies import Scaling
from fusible.ops.kernels.hopper import quantize
from fusible.ops.kernels.problems.quantized import (
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizeRows,
    QuantizeWeight,
)
from fusible.ops.kernels.pytorch import quantize as pytorch_quantize
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_rows(sizes: list[int], power_of_two: bool) -> None:
    checks.check_rows("cpu", sizes, 272, power_of_two=power_of_two)


@pytest.mark.parametrize("features", [16, 400])
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_columns_of_bytes(sizes: list[int], features: int) -> None:
    checks.check_columns_of_bytes("cpu", sizes, features, pitch=8 if features == 16 else 0)


def test_bytes_that_are_refused() -> None:
    memory = torch.zeros(4, 40, dtype=torch.uint8)
    rows, exponents = memory[:, :32].view(torch.float8_e4m3fn), memory[:, 32:33]
    problem = QuantizeRows(rows, torch.tensor([4]), True, None, checks.columns_copy(4, 1, 32, "cpu"))
    problem.exponents = exponents
    assert quantize.refusal(problem) is None
    problem.exponents = exponents.clone()
    assert "needs exponents [4, 1] of 8 bits at the strides of the rows" in str(quantize.refusal(problem))
    problem.exponents, problem.x = exponents, memory[:, :32]
    assert "needs rows of e4m3 at multiples of 8 bytes, got torch.uint8" in str(quantize.refusal(problem))
    problem.x, problem.rows = rows, checks.rows_copy(4, 32, "cpu")
    assert "their columns alone" in str(quantize.refusal(problem))


@pytest.mark.parametrize("want", ["rows", "columns"])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_one_copy(dtype: torch.dtype, want: str) -> None:
    """Rows with a pitch, and int32 group sizes."""
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


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("name", checks.SPECS)
def test_activation(name: str, power_of_two: bool) -> None:
    checks.check_activation("cpu", name, 256, power_of_two=power_of_two)


@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_activation_of_partial_blocks(dtype: torch.dtype) -> None:
    for want, scales in (("rows", None), ("columns", torch.bfloat16)):
        checks.check_activation("cpu", "silu glu", 144, dtype, want=want, scales=scales)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("name", [name for name in checks.SPECS if name != "blocks of 32"])
def test_activation_backward(name: str, power_of_two: bool) -> None:
    checks.check_activation_backward("cpu", name, 256, power_of_two=power_of_two)


@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_functions_of_users(name: str) -> None:
    checks.check_activation("cpu", name, 256)
    checks.check_activation_backward("cpu", name, 256)


def test_functions_of_users_without_scales_and_without_gradients_of_columns() -> None:
    checks.check_activation("cpu", "user's slope", 256, torch.float16, scales=None, power_of_two=False)
    wanted = "rows, postact, dvectors"
    checks.check_activation_backward("cpu", "user's slope", 256, torch.float16, scales=None, want=wanted)
    checks.check_activation_backward("cpu", "user's slope", 256, want="columns")


@pytest.mark.parametrize("features", [16, 144, 208])
def test_functions_of_users_in_partial_tiles(features: int) -> None:
    for name in ("user's shift", "user's slope of a row, blocks of 1"):
        checks.check_activation("cpu", name, features)
        checks.check_activation_backward("cpu", name, features, sizes=(130, 0, 3, 64))


@pytest.mark.parametrize("name", ["blocks of 1", "blocks of 2", "blocks of 4"])
@pytest.mark.parametrize("features", [16, 64, 80, 144, 208])
def test_alternating_gates_and_ups(name: str, features: int) -> None:
    """A tile of activated features is one or two of the pre-activation, of which the last may be narrow."""
    checks.check_activation("cpu", name, features, scales=None)
    checks.check_activation_backward("cpu", name, features, torch.float16, sizes=(130, 0, 3))


@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
@pytest.mark.parametrize("want", ["rows", "columns", "rows, postact", "rows, columns, dscales"])
def test_parts_of_an_activation_backward(want: str, dtype: torch.dtype) -> None:
    checks.check_activation_backward("cpu", "gelu_tanh", 144, dtype, want=want, scales=torch.bfloat16)
    checks.check_activation_backward("cpu", "silu glu", 128, dtype, want=want, scales=None)


def activation_problem(spec: ActivationSpec, features: int = 128) -> QuantizeActivation:
    preact = torch.ones(4, features * 2).bfloat16()
    return QuantizeActivation(preact, torch.tensor([4]), spec, None, True, checks.rows_copy(4, features, "cpu"), None)


def test_activations_that_are_refused() -> None:
    problem = activation_problem(gated("silu", None, 1.0, 0.0, interleaved(12)), 144)
    assert "blocks of gate and up of 1, 2 or 4 columns, or multiples of 8, got 12" in str(quantize.refusal(problem))
    problem = activation_problem(checks.SPECS["silu glu"])
    assert quantize.refusal(problem) is None
    problem.scales = torch.ones(4, dtype=torch.float64)
    assert "dense scales of 16 or 32 bits" in str(quantize.refusal(problem))
    problem = activation_problem(checks.SPECS["silu glu"])
    problem.preact = problem.preact.float()
    assert "quantises bfloat16 or float16 rows" in str(quantize.refusal(problem))


def test_backwards_that_are_refused() -> None:
    spec, sizes, dy = checks.SPECS["blocks of 32"], torch.tensor([4]), torch.ones(4, 128).bfloat16()
    problem = QuantizeActivationBackward(dy, dy.repeat(1, 2), sizes, spec, None, True, None, None, None, None)
    assert "multiples of 128, got 32" in str(quantize.refusal(problem))
    problem.activation = checks.SPECS["silu glu"]
    assert quantize.refusal(problem) is None
    problem.dpostact = dy.half()
    assert "dense rows of one dtype" in str(quantize.refusal(problem))


@pytest.mark.parametrize("want", ["rows and columns", "rows", "columns"])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_gathered_rows(dtype: torch.dtype, want: str) -> None:
    checks.check_gathered_rows("cpu", 70, 3, 144, dtype, want)


def test_torch_brings_rows_to_experts_alike() -> None:
    r = checks.routed(20, 3, 5, 144, torch.bfloat16, "cpu")
    sizes, gathered = r.tokens_per_expert[:-1], r.x[r.slot_of_row // 3]
    found, expected = checks.rows_copy(60, 144, "cpu"), reference.quantize_rows(gathered, True)

    pytorch_quantize.run(QuantizeRows(r.x, sizes, True, found, None, r.slot_of_row, 3))

    checks.assert_same(found.data, expected.data, "bytes")
    checks.assert_same(found.scales, expected.scales, "scales")


of_whole = pytest.mark.parametrize("scaling", whole.WHOLE, ids=lambda scaling: scaling.value)


@of_whole
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_whole_rows(sizes: list[int], scaling: Scaling, power_of_two: bool) -> None:
    whole.check_rows("cpu", sizes, 272, scaling, power_of_two=power_of_two)


@of_whole
@pytest.mark.parametrize("want", ["rows", "columns"])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_one_whole_copy(dtype: torch.dtype, scaling: Scaling, want: str) -> None:
    """Rows with a pitch, and int32 group sizes."""
    whole.check_rows("cpu", checks.SIZES[0], 400, scaling, dtype, want=want, pitch=8, index=torch.int32)


@of_whole
def test_whole_rows_of_many_groups(scaling: Scaling, emulation: harness.Emulation) -> None:
    with emulation.shuffled(1):
        whole.check_rows("cpu", [g % 4 for g in range(70)], 144, scaling, tail=129)


@of_whole
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_every_whole_amax(dtype: torch.dtype, scaling: Scaling, power_of_two: bool) -> None:
    whole.check_every_amax("cpu", scaling, dtype, power_of_two, slice(3, None, 64))


@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_scales_of_steps_before(dtype: torch.dtype) -> None:
    whole.check_earlier_scales("cpu", dtype)


@of_whole
@pytest.mark.parametrize("want", ["rows and columns", "rows", "columns"])
def test_whole_rows_that_are_gathered(scaling: Scaling, want: str) -> None:
    whole.check_gathered_rows("cpu", scaling, 70, 3, 144, want)


@of_whole
@pytest.mark.parametrize("asked", whole.WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [*checks.HALVES, torch.float32], ids=str)
def test_weight_of_whole_scales(dtype: torch.dtype, scaling: Scaling, asked: dict[str, object]) -> None:
    whole.check_weight("cpu", scaling=scaling, dtype=dtype, **asked)  # type: ignore[arg-type]


def test_weight_with_scales_of_steps_before() -> None:
    whole.check_weight("cpu", 3, 144, 160, Scaling.GROUPS, encode=torch.tensor([0.1, 2.0**15, 5.0]))


def test_factors_that_are_refused() -> None:
    problem = rows_problem(torch.ones(4, 32).bfloat16())
    problem.scaling = Scaling.ROWS
    assert quantize.refusal(problem) is None
    problem.encode = torch.ones(1)
    assert "where groups have the scales, not rows" in str(quantize.refusal(problem))
    problem.scaling = Scaling.GROUPS
    assert quantize.refusal(problem) is None
    problem.encode = torch.ones(2)
    assert "needs [1] dense float32 numbers to multiply groups by, got [2]" in str(quantize.refusal(problem))
