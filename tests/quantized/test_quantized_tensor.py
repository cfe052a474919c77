"""Quantised tensors as objects: their copies come back, are saved and loaded, and are checked."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from fusible import (
    MXFP8,
    NVFP4,
    Delayed,
    Float8Block,
    Float8Row,
    Float8Tensor,
    GroupedTensor,
    NoRecipe,
    QuantizedGroupedTensor,
)
from fusible.ops.formats import reference

RECIPES = [
    Float8Block(),
    Float8Block(scales="float32"),
    Float8Row(),
    Float8Tensor(),
    MXFP8(),
    NVFP4(),
    NVFP4(hadamard=False),
]
SIZES = torch.tensor([70, 0, 130, 1])
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def bound(recipe: Any) -> float:
    return 0.18 if isinstance(recipe, NVFP4) else 0.04


@each_recipe
@pytest.mark.parametrize("columnwise", [False, True])
def test_tokens_come_back(recipe: Any, columnwise: bool) -> None:
    x = torch.randn(206, 272).bfloat16()

    tensor = QuantizedGroupedTensor.quantize(x, recipe, SIZES, columnwise=True)
    values = tensor.dequantize(columnwise=columnwise)

    assert values.dtype == x.dtype
    assert values.shape == x.shape
    assert (values[:201] - x[:201]).float().norm() < bound(recipe) * x[:201].float().norm()
    assert (values[201:] == 0).all()
    assert tensor.num_groups == 4


@each_recipe
@pytest.mark.parametrize("columnwise", [False, True])
def test_weights_come_back(recipe: Any, columnwise: bool) -> None:
    weight = torch.randn(3, 288, 272)

    tensor = QuantizedGroupedTensor.quantize(weight, recipe, columnwise=True, halves=2)
    values = tensor.dequantize(columnwise=columnwise)

    assert values.dtype == torch.float32
    assert (values - weight).norm() < bound(recipe) * weight.norm()
    assert tensor.num_groups == 3


def test_kernels_read_its_copies() -> None:
    x, weight = torch.randn(206, 272).bfloat16(), torch.randn(4, 144, 272)

    tokens = QuantizedGroupedTensor.quantize(GroupedTensor(x, SIZES), Float8Block(), columnwise=True)
    weights = QuantizedGroupedTensor.quantize(weight, Float8Block(), columnwise=True)

    rows, columns = reference.quantize_rows(x, True), reference.quantize_columns(x, SIZES, True)
    copies = reference.quantize_weight(weight, 1, True)
    for found, expected in zip(
        [
            *(tokens.rowwise, tokens.rowwise_scales, tokens.columnwise, tokens.columnwise_scales),
            *(weights.rowwise, weights.columnwise, weights.rowwise_scales, weights.columnwise_scales),
        ],
        [*rows[:2], *columns[:2], copies.data, copies.data.mT, copies.scales, copies.scales],
        strict=True,
    ):
        assert found is not None
        assert expected is not None
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@each_recipe
def test_a_saved_tensor_is_loaded(recipe: Any) -> None:
    x = torch.randn(206, 272).bfloat16()
    tensor, file = QuantizedGroupedTensor.quantize(x, recipe, SIZES, columnwise=True), io.BytesIO()

    torch.save(tensor.state(), file)
    file.seek(0)
    loaded = QuantizedGroupedTensor.from_state(torch.load(file, weights_only=True))

    assert repr(loaded) == repr(tensor)
    assert loaded.recipe == recipe
    for columnwise in (False, True):
        same = torch.equal(
            loaded.dequantize(columnwise=columnwise)[:201], tensor.dequantize(columnwise=columnwise)[:201]
        )
        assert same


@pytest.mark.parametrize("make", [Float8Block, Float8Row, Float8Tensor])
def test_gradients_are_of_the_format_of_the_recipe(make: Any) -> None:
    dy, recipe = torch.randn(206, 272).bfloat16(), make(gradient="e5m2")

    gradient = QuantizedGroupedTensor.quantize(dy, recipe, SIZES, columnwise=True, is_gradient=True)
    other = QuantizedGroupedTensor.quantize(dy, recipe, SIZES)

    assert other.rowwise is not None
    assert gradient.rowwise is not None
    assert gradient.columnwise is not None
    assert (gradient.rowwise.dtype, gradient.columnwise.dtype) == (torch.float8_e5m2, torch.float8_e5m2)
    assert other.rowwise.dtype == torch.float8_e4m3fn
    loaded = QuantizedGroupedTensor.from_state(gradient.state())
    for columnwise in (False, True):
        values = loaded.dequantize(columnwise=columnwise)[:201]
        assert 0.04 < (values - dy[:201]).float().norm() / dy[:201].float().norm() < 0.08


def test_only_the_wanted_copies_are_made() -> None:
    x = torch.randn(206, 272).bfloat16()

    columns = QuantizedGroupedTensor.quantize(x, Float8Block(), SIZES, rowwise=False, columnwise=True)

    assert columns.rowwise is None
    assert columns.dequantize().shape == x.shape
    assert "rowwise" not in columns.state()
    assert columns.device == x.device
    assert "[206, 272], torch.bfloat16, columnwise)" in repr(columns)
    with pytest.raises(ValueError, match="there is no rowwise copy"):
        columns.dequantize(columnwise=False)


def test_it_moves_to_another_device() -> None:
    tensor = QuantizedGroupedTensor.quantize(torch.randn(3, 16, 32), MXFP8())

    assert tensor.to("meta").device == torch.device("meta")


X = torch.ones(5, 32, dtype=torch.bfloat16)
DATA = X.to(torch.float8_e4m3fn)


def quantised() -> QuantizedGroupedTensor:
    return QuantizedGroupedTensor.quantize(X, Float8Row(), torch.tensor([5]))


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in state.items() if other != name}


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: QuantizedGroupedTensor.quantize(X, Float8Block()),
            r"expected weights \[E, N, K\], got shape \[5, 32\]",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X.unsqueeze(0), Float8Block(), torch.tensor([5])),
            r"expected tokens \[T, K\] with first_dims",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(
                GroupedTensor(torch.ones(10), last_dims=torch.tensor([2, 3]), rows=2), Float8Block()
            ),
            "ragged in their columns are not quantised",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X.int(), MXFP8(), torch.tensor([5])),
            "data must be of bfloat16, float16 or float32, got torch.int32",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X.double(), Float8Block(), torch.tensor([5])),
            "data must be of bfloat16, float16 or float32, got torch.float64",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X, Float8Block(), torch.tensor([5.0])),
            r"first_dims must be int32 or int64 \[E\] on cpu, got \[1\], torch.float32 on cpu",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X, Float8Block(), torch.tensor([[5]])),
            r"first_dims must be int32 or int64 \[E\] on cpu, got \[1, 1\]",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X, Float8Block(), [5]),  # type: ignore[arg-type]
            r"first_dims must be int32 or int64 \[E\] on cpu, got \[5\]",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X, "float8", torch.tensor([5])),  # type: ignore[arg-type]
            r"recipe must be one such as fusible.Float8Block\(\), got 'float8'",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X.unsqueeze(0), MXFP8(), halves=2),
            "halves must be 1, or 2 of an even number of rows, got 2 of 5",
        ),
        (lambda: QuantizedGroupedTensor.quantize(X, NoRecipe(), torch.tensor([5])), "NoRecipe quantises nothing"),
        (
            lambda: QuantizedGroupedTensor.quantize(X, Float8Tensor(delayed=Delayed()), torch.tensor([5])),
            "takes its scales from earlier steps",
        ),
        (
            lambda: QuantizedGroupedTensor(Float8Block(), X.shape, X.dtype, torch.tensor([5])),
            "needs a rowwise or a columnwise copy",
        ),
        (
            lambda: QuantizedGroupedTensor(Float8Block(), X.shape, X.dtype, torch.tensor([5]), rowwise=DATA),
            r"rowwise_scales must be \(\[1, 8\], torch.float32\) under Float8Block\(.*\), got None",
        ),
        (
            lambda: QuantizedGroupedTensor(
                Float8Row(), X.shape, X.dtype, torch.tensor([5]), rowwise=X, rowwise_scales=torch.ones(5)
            ),
            r"rowwise must be \(\[5, 32\], torch.float8_e4m3fn\)",
        ),
        (
            lambda: QuantizedGroupedTensor.from_state({"recipe": {"name": "INT8"}}),
            "no recipe 'INT8', only Float8Block, Float8Row",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X, Float8Row(), torch.tensor([3, 3])),
            r"first_dims \[3, 3\] do not fit into 5 rows",
        ),
        (
            lambda: QuantizedGroupedTensor.quantize(X, Float8Row(), torch.tensor([6, -1])),
            r"first_dims \[6, -1\] do not fit into 5 rows",
        ),
        (
            lambda: QuantizedGroupedTensor.from_state({**quantised().state(), "first_dims": torch.tensor([9])}),
            r"first_dims \[9\] do not fit into 5 rows",
        ),
        (
            lambda: QuantizedGroupedTensor.from_state(without(quantised().state(), "first_dims")),
            r"expected shape \[E, N, K\] without first_dims, got \[5, 32\]",
        ),
        *[
            (
                lambda name=name: QuantizedGroupedTensor.from_state(without(quantised().state(), name)),
                f"{name} is missing in the state; there are ",
            )
            for name in ("recipe", "shape", "dtype")
        ],
    ],
)
def test_what_does_not_fit_is_refused(build: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()
