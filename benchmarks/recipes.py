"""The recipes of the benchmarks, by their names on the command line."""

from __future__ import annotations

from fusible import MXFP8, NVFP4, Float8Block, Float8Row, Float8Tensor
from fusible.ops.formats.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    "Float8Block": Float8Block(),
    "Float8Block-float32": Float8Block(scales="float32"),
    "Float8Block-bfloat16-wgrad": Float8Block(wgrad="bfloat16"),
    "Float8Row": Float8Row(),
    "Float8Row-float32": Float8Row(scales="float32"),
    "Float8Tensor": Float8Tensor(),
    "Float8Tensor-e5m2": Float8Tensor(gradient="e5m2"),
    "MXFP8": MXFP8(),
    "MXFP8-fast": MXFP8(compute="fast"),
    "NVFP4": NVFP4(),
}


def rounding(recipe: Recipe) -> float:
    """The relative error of a product due to all roundings of its operands."""
    if isinstance(recipe, NVFP4):
        return 3 * 2.0**-3
    return 2.0**-3 if getattr(recipe, "gradient", "e4m3") == "e5m2" else 2.0**-4
