"""Products of quantised tensors under every recipe: those of the values of their copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import MXFP8, NVFP4, Float8Block, Float8Row, Float8Tensor, QuantizedGroupedTensor
from fusible.ops import quantized_products as products

RECIPES = [
    Float8Block(),
    Float8Block(gradient="e5m2"),
    Float8Row(),
    Float8Tensor(),
    MXFP8(),
    MXFP8("fast"),
    NVFP4(),
    NVFP4(hadamard=False),
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)
SIZES = [70, 0, 130, 1]
E, T, N, K = len(SIZES), 205, 256, 144


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def operands(recipe: Any) -> tuple[QuantizedGroupedTensor, QuantizedGroupedTensor, QuantizedGroupedTensor]:
    """x, dy and the weight, of magnitudes that differ by group."""
    sizes = torch.tensor(SIZES)
    by_row = torch.tensor([1.0, 1.0, 30.0, 0.1, 1.0]).repeat_interleave(torch.tensor([*SIZES, T - 201])).unsqueeze(1)
    x, dy = (torch.randn(T, K) * by_row).bfloat16(), (torch.randn(T, N) * by_row).bfloat16()
    weight = torch.randn(4, N, K) * torch.tensor([1.0, 3.0, 0.1, 10.0]).view(-1, 1, 1)
    quantize = QuantizedGroupedTensor.quantize
    return (
        quantize(x, recipe, sizes, columnwise=True),
        quantize(dy, recipe, sizes, columnwise=True, is_gradient=True),
        quantize(weight.bfloat16(), recipe, columnwise=True, halves=2),
    )


def by_group(rows: Tensor, matrices: Tensor) -> Tensor:
    parts = zip(rows[:201].double().split(SIZES), matrices.double(), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


def error_by_group(value: Tensor, expected: Tensor) -> float:
    """The largest relative one of a group."""
    pairs = zip(value.double().split(SIZES), expected.split(SIZES), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if len(a))


def values(tensor: QuantizedGroupedTensor, columnwise: bool) -> Tensor:
    return tensor.dequantize(torch.float64, columnwise=columnwise)


ROUNDED = 2**-8


@each_recipe
def test_forward(recipe: Any) -> None:
    x, _, weight = operands(recipe)

    y = products.forward(x, weight)

    assert y.dtype == torch.bfloat16
    assert error_by_group(y[:201], by_group(values(x, False), values(weight, False).mT)) < ROUNDED
    assert (y[201:] == 0).all()


@each_recipe
def test_input_grad(recipe: Any) -> None:
    _, dy, weight = operands(recipe)

    dx = products.input_grad(dy, weight)

    of_weight = values(weight, recipe != MXFP8("fast"))
    assert error_by_group(dx[:201], by_group(values(dy, False), of_weight)) < ROUNDED
    assert (dx[201:] == 0).all()


@each_recipe
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_weight_grad(recipe: Any, out_dtype: torch.dtype | None) -> None:
    x, dy, _ = operands(recipe)

    dw = products.weight_grad(dy, x, out_dtype)

    assert dw.dtype == (out_dtype or torch.bfloat16)
    of_dy, of_x = (values(tensor, True)[:201].split(SIZES) for tensor in (dy, x))
    bound = ROUNDED if out_dtype is None else 1e-5
    if out_dtype is not None and recipe in (MXFP8("fast"), NVFP4()):
        bound = 2e-3  # regrouped; or what the transform has spread over the places that fill the last block
    for group in (0, 2, 3):
        expected = of_dy[group].t() @ of_x[group]
        assert (dw[group].double() - expected).norm() < bound * expected.norm()
    assert (dw[1] == 0).all()


def test_the_exact_and_the_fast_way_of_mxfp8_agree() -> None:
    x, dy, weight = operands(MXFP8())
    fast_recipe = {"name": "MXFP8", "compute": "fast"}
    fast = [QuantizedGroupedTensor.from_state({**t.state(), "recipe": fast_recipe}) for t in (x, dy, weight)]

    difference = products.forward(x, weight).double() - products.forward(fast[0], fast[2]).double()

    assert difference.norm() < ROUNDED * products.forward(x, weight).double().norm()


def test_what_does_not_fit_is_refused() -> None:
    x, dy, weight = operands(Float8Block())
    other = operands(MXFP8())[2]
    rows = QuantizedGroupedTensor.quantize(torch.randn(T, K), Float8Block(), torch.tensor(SIZES))
    odd = QuantizedGroupedTensor.quantize(torch.randn(len(SIZES), 2 * 72, K), Float8Block(), halves=2)
    dy_of_odd = QuantizedGroupedTensor.quantize(torch.randn(T, 2 * 72), Float8Block(), torch.tensor(SIZES))

    with pytest.raises(ValueError, match=r"operands of one recipe are multiplied, got Float8Block\(.*MXFP8"):
        products.forward(x, other)
    with pytest.raises(ValueError, match="the first operand must be tokens"):
        products.forward(weight, x)
    with pytest.raises(ValueError, match="the copy that the product reads is missing"):
        products.weight_grad(dy, rows)
    with pytest.raises(ValueError, match="halves of 72 rows are not whole blocks of 128"):
        products.input_grad(dy_of_odd, odd)


@each_recipe
def test_operands_of_sizes_that_do_not_fit_are_refused(recipe: Any) -> None:
    """Kernels would read memory beyond one of them."""
    x, dy, weight = operands(recipe)

    def tokens(features: int, sizes: list[int], rows: int = T) -> QuantizedGroupedTensor:
        data = torch.randn(rows, features, dtype=torch.bfloat16)
        return QuantizedGroupedTensor.quantize(data, recipe, torch.tensor(sizes), columnwise=True)

    with pytest.raises(
        ValueError, match=rf"forward: with a first operand of .* have shape \[{E}, any, {K + 32}\], got"
    ):
        products.forward(tokens(K + 32, SIZES), weight)
    with pytest.raises(ValueError, match=rf"input_grad: .* have shape \[{E}, {K}, any\], got \[{E}, {N}, {K}\]"):
        products.input_grad(x, weight)
    with pytest.raises(ValueError, match=rf"forward: .* in 2 groups the second must have shape \[2, any, {K}\]"):
        products.forward(tokens(K, [3, 5]), weight)
    with pytest.raises(ValueError, match=rf"forward: .*, got \[{T}, {K}\]"):
        products.forward(x, x)
    with pytest.raises(ValueError, match=rf"weight_grad: .* have shape \[{T}, any\], got \[{T + 1}, {K}\]"):
        products.weight_grad(dy, tokens(K, SIZES, T + 1))
    with pytest.raises(ValueError, match="weight_grad: dy and x must have the same first_dims"):
        products.weight_grad(dy, tokens(K, SIZES[::-1]))
    with pytest.raises(ValueError, match="forward: expected a QuantizedGroupedTensor, got a Tensor"):
        products.forward(x, torch.randn(E, N, K))  # type: ignore[arg-type]
