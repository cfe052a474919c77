"""How fast a step with few rows reads weights, in 16 bits and quantised.

    python -m fusible.benchmarks.few_rows --preset mixtral --tokens 8

The first linear of a layer's experts. Bytes count the weights of experts with rows, each once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product as pairs
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fusible import MXFP4, MXFP8, NVFP4, Float8Block, Float8Row, Float8Tensor
from fusible.ops import kernels
from fusible.ops.formats.recipe import Recipe
from fusible.ops.kernels import Layout
from fusible.ops.kernels.hopper import backend
from fusible.ops.kernels.problems.gemm import nbytes
from fusible.ops.quantized.linear import product
from fusible.ops.quantized.operands import tokens_for

from .arguments import positive, require_cuda
from .problem import PRESETS, Preset
from .timing import graph_of, interleaved, markdown

CALLS = 10  # of a graph
Way = tuple[Callable[[], Any], int]

RECIPES: Mapping[str, tuple[Recipe, int]] = {  # with the number of rows up to which packed weights are read directly
    "Float8Block": (Float8Block(), 0),
    "Float8Row": (Float8Row(), 0),
    "Float8Tensor": (Float8Tensor(), 0),
    "MXFP8": (MXFP8(), 0),
    "MXFP8, as it lies": (MXFP8(), backend.FEW_ROWS),
    "NVFP4": (NVFP4(), 0),
    "NVFP4, as it lies": (NVFP4(), backend.FEW_ROWS),
    "MXFP4": (MXFP4(), 0),
    "MXFP4, as it lies": (MXFP4(), backend.FEW_ROWS),
}


def ways(preset: Preset, tokens: int, device: str) -> tuple[Tensor, dict[str, Way]]:
    """The split sizes; and by name, each way to compute the product with the bytes of its weights."""
    experts, k, n = preset.experts, preset.features, 2 * preset.hidden
    ids = torch.rand(tokens, experts, device=device).topk(min(preset.top_k, experts), -1).indices
    sizes = ids.view(-1).bincount(minlength=experts)
    x = torch.randn(ids.numel(), k, device=device, dtype=torch.bfloat16)
    weight = torch.randn(experts, n, k, device=device, dtype=torch.bfloat16)
    by_name: dict[str, Way] = {
        "bfloat16": (partial(kernels.grouped_gemm, Layout.NT, x, weight, sizes), nbytes(weight)),
    }
    for name, (recipe, rows) in RECIPES.items():
        by_name[name] = quantised(recipe, rows, x, weight, sizes)
    return sizes, by_name


def quantised(recipe: Recipe, rows_as_they_lie: int, x: Tensor, weight: Tensor, sizes: Tensor) -> Way:
    """The product of a weight that stays quantised with rows that are already quantised."""
    copy = recipe.weight(weight)
    rows = tokens_for(None, recipe, x, sizes, rows=True, wgrad=False).rows
    assert rows is not None

    def run() -> Tensor:
        with patch.object(backend, "FEW_ROWS", rows_as_they_lie):
            return product(recipe, rows, recipe.stored_operand(copy), sizes, torch.bfloat16)

    return run, nbytes(copy.data, copy.scales)


def rows_of(preset: Preset, tokens: int, rounds: int) -> list[Sequence[str]]:
    """The lines of the table, one for each way."""
    sizes, by_name = ways(preset, tokens, "cuda")
    share = float((sizes > 0).float().mean())
    graphs = {name: graph_of(run, CALLS) for name, (run, _) in by_name.items()}
    seconds = interleaved(graphs, rounds, "cuda", steady=True)
    lines: list[Sequence[str]] = []
    for name, (_, size) in by_name.items():
        once = seconds[name] / CALLS
        moved = size * share
        lines.append((name, f"{once * 1e6:.1f}", f"{moved / 1e6:.1f}", f"{moved / once / 1e9:.0f}"))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for every preset and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, nargs="+", default=["mixtral", "qwen3"])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=positive, default=7)
    args = parser.parse_args(argv)
    require_cuda(parser)
    for name, tokens in pairs(args.preset, args.tokens):
        with torch.inference_mode():
            lines = rows_of(PRESETS[name], tokens, args.rounds)
        print(markdown([f"{name}, {tokens} tokens", "µs", "MB of weights", "GB/s"], lines), end="\n\n")


if __name__ == "__main__":
    main()
