"""Errors of products of quantised operands by recipe: relative, in the Frobenius norm, on a CPU.

``python -m fusible.benchmarks.quantized_errors`` prints Markdown: y, dx and dW of a grouped linear, multiplied exactly,
so that only the rounding of operands counts; after the errors of a linear in bfloat16. NVFP4 rounds to nearest here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusible import MXFP8, NVFP4, Float8Block, Float8Row, Float8Tensor, QuantizedGroupedTensor
from fusible.ops.formats.recipe import Recipe

from .timing import markdown

RECIPES: dict[str, Recipe | None] = {
    "bfloat16": None,
    "Float8Block()": Float8Block(),
    'Float8Block(scales="float32")': Float8Block(scales="float32"),
    "Float8Row()": Float8Row(),
    "Float8Tensor()": Float8Tensor(),
    'Float8Tensor(gradient="e5m2")': Float8Tensor(gradient="e5m2"),
    "MXFP8()": MXFP8(),
    "NVFP4()": NVFP4(),
    "NVFP4(hadamard=False)": NVFP4(hadamard=False),
}
KINDS = ("normal", "outliers", "heavy tails")


class LinearOperands(NamedTuple):
    """The operands of a grouped linear, bfloat16: x [T, K], dy [T, N], weight [E, N, K]; split sizes [E]."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, kind: str, tokens: int, features: int, columns: int, groups: int) -> LinearOperands:
        """Draws rows and gradients of a kind, and normal weights; the last group is longer than the others."""
        sizes = torch.full((groups,), tokens // groups - 3)
        sizes[-1] += tokens - int(sizes.sum())
        weight = torch.randn(groups, columns, features).bfloat16()
        return cls(sample(kind, tokens, features), sample(kind, tokens, columns), weight, sizes)


class Products(NamedTuple):
    """The results in float64: y [T, N], dx [T, K], dW [E, N, K]."""

    y: Tensor
    dx: Tensor
    dw: Tensor


def sample(kind: str, rows: int, features: int) -> Tensor:
    """Random numbers in bfloat16: normal; with one channel in a hundred times thirty; or Student's t with 3 degrees of
    freedom.
    """
    if kind == "heavy tails":
        return torch.distributions.StudentT(3.0).sample(torch.Size((rows, features))).bfloat16()
    x = torch.randn(rows, features)
    if kind == "outliers":
        x[:, torch.randperm(features)[: max(1, features // 100)]] *= 30
    return x.bfloat16()


def exact(linear: LinearOperands) -> Products:
    """The products of the unquantised operands."""
    y = row_products(linear.x, linear.weight.mT, linear.sizes)
    return Products(
        y, row_products(linear.dy, linear.weight, linear.sizes), weight_grads(linear.dy, linear.x, linear.sizes)
    )


def quantised(linear: LinearOperands, recipe: Recipe) -> Products:
    """The products of the dequantised operands that each product reads."""
    sizes = linear.sizes
    x, dy, weight = (
        QuantizedGroupedTensor.quantize(linear.x, recipe, sizes, columnwise=True),
        QuantizedGroupedTensor.quantize(linear.dy, recipe, sizes, columnwise=True, is_gradient=True),
        QuantizedGroupedTensor.quantize(linear.weight, recipe, columnwise=True),
    )
    return Products(
        row_products(rowwise(x), rowwise(weight).mT, sizes),
        row_products(rowwise(dy), columnwise(weight), sizes),
        weight_grads(columnwise(dy), columnwise(x), sizes),
    )


def rowwise(tensor: QuantizedGroupedTensor) -> Tensor:
    return tensor.dequantize(torch.float32, columnwise=False)


def columnwise(tensor: QuantizedGroupedTensor) -> Tensor:
    return tensor.dequantize(torch.float32, columnwise=True)


def row_products(rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
    """Each group of rows times its matrix, in float64."""
    parts = zip(rows.double().split_with_sizes(sizes.tolist()), matrices.double(), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


def weight_grads(dy: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    """The weight gradient of each group, in float64."""
    parts = zip(dy.double().split_with_sizes(sizes.tolist()), x.double().split_with_sizes(sizes.tolist()), strict=True)
    return torch.stack([left.t() @ right for left, right in parts])


def errors(linear: LinearOperands, recipe: Recipe | None) -> Iterator[float]:
    """The errors of y, dx and dW; without a recipe, those of rounding the results to bfloat16."""
    products = exact(linear)
    approximate = [p.bfloat16() for p in products] if recipe is None else quantised(linear, recipe)
    for value, expected in zip(approximate, products, strict=True):
        yield float((value - expected).norm() / expected.norm())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    for name, size in (("tokens", 1024), ("features", 1024), ("columns", 768), ("groups", 4)):
        parser.add_argument(f"--{name}", type=int, default=size)
    sizes = parser.parse_args(arguments)
    torch.manual_seed(0)
    linears = [LinearOperands.of(kind, sizes.tokens, sizes.features, sizes.columns, sizes.groups) for kind in KINDS]
    rows = [
        [name, *(" / ".join(f"{error:.4f}" for error in errors(linear, recipe)) for linear in linears)]
        for name, recipe in RECIPES.items()
    ]
    print(markdown(("y / dx / dW", *KINDS), rows))


if __name__ == "__main__":
    main()
