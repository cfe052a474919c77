"""The passes of a low-rank adapter over rows: one kernel, compared with a gather and separate products.

    python -m fusible.benchmarks.low_rank --preset qwen3 --tokens 8192

The passes are those of a step of routed experts with adapters. Bytes count operands and results, each once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible.ops.kernels import Layout
from fusible.ops.kernels.doors import low_rank, routing
from fusible.ops.kernels.problems.gemm import nbytes

from .arguments import positive, require_cuda
from .problem import PRESETS, Preset
from .timing import graph_of, interleaved, markdown

CALLS = 10  # of a graph
Pass = tuple[Tensor, Layout, dict[str, Any]]


def passes(preset: Preset, tokens: int, rank: int) -> tuple[Tensor, dict[str, Pass]]:
    """The split sizes; and by name, the rows of each pass, the layout of its factors, and the requested results."""
    experts, slots = preset.experts, tokens * preset.top_k
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    ids = torch.rand(tokens, experts, device="cuda").topk(preset.top_k, -1).indices
    routed = routing.route(ids, experts)
    x, low = torch.randn(tokens, preset.features, **options), torch.randn(slots, rank, **options)
    hidden, dpreact = (torch.randn(slots, n, **options) for n in (preset.hidden, 2 * preset.hidden))

    def factor(layout: Layout, columns: int) -> dict[str, Tensor]:
        shape = (rank, columns) if layout is Layout.NT else (columns, rank)
        return {"factor": torch.randn(experts, *shape, **options)}

    of_tokens, of_hidden = (factor(Layout.NT, n) for n in (preset.features, preset.hidden))
    of_dy, of_dpreact = (factor(Layout.NN, n) for n in (preset.features, 2 * preset.hidden))
    gathered = {"routing": routed, "want_rows": True}
    return routed.split_sizes, {
        "rows of x, x A1": (x, Layout.NT, gathered | of_tokens),
        "h A2": (hidden, Layout.NT, of_hidden),
        "rows of dy, dy B2, gradient of B2": (x, Layout.NN, gathered | of_dy | {"low": low}),
        "gradient of A2": (hidden, Layout.NT, {"low": low}),
        "dpreact B1, gradient of B1": (dpreact, Layout.NN, of_dpreact | {"low": low}),
        "gradient of A1, of gathered rows": (x, Layout.NT, {"routing": routed, "low": low}),
        "x A1, of rows that lie": (torch.randn(slots, preset.features, **options), Layout.NT, of_tokens),
    }


def once(of: Pass, sizes: Tensor, kinds: frozenset[str]) -> low_rank.LowRank:
    """The pass, by one kernel if its kind is in ``kinds``."""
    x, layout, options = of
    before, low_rank.PASSES = low_rank.PASSES, kinds
    try:
        return low_rank.low_rank_pass(x, layout, sizes, **options)
    finally:
        low_rank.PASSES = before


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3")
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=7)
    args = parser.parse_args(argv)
    require_cuda(parser)
    sizes, all_passes = passes(PRESETS[args.preset], args.tokens, args.rank)
    rows = []
    for name, of in all_passes.items():
        kinds = {"kernel": low_rank.ALL_PASSES, "products": frozenset[str]()}
        graphs = {key: graph_of(partial(once, of, sizes, kinds[key]), CALLS) for key in kinds}
        seconds = interleaved(graphs, args.rounds, "cuda", steady=True)
        micros = [seconds[key] / CALLS * 1e6 for key in kinds]
        moved = nbytes(of[0], of[2].get("factor"), of[2].get("low"), *once(of, sizes, low_rank.ALL_PASSES))
        rows.append([name, *(f"{time:.1f}" for time in micros), f"{moved >> 20}", f"{moved / micros[0] / 1e6:.2f}"])
    heading = f"{args.preset}, {args.tokens} tokens, rank {args.rank}, bf16"
    print(markdown([heading, "one kernel, µs", "gather and products, µs", "MB", "TB/s"], rows))


if __name__ == "__main__":
    main()
