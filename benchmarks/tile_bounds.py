"""The share of the tensor cores' speed that tiles allow, counted without a GPU.

    python -m fusible.benchmarks.tile_bounds --preset deepseek-v3-ep8 qwen3 --tokens 8192 --distribution random zipf

Each product of the experts is cut into the tiles that the kernels choose among, and these are handed to 132
multiprocessors on demand. Shares are of the tensor cores' cycles: after rounding up rows, and after the incomplete last
round; then with the longest tasks first. Shared memory moves 128 bytes per cycle for operands, products and results;
its share is relative to the cycles of products of rounded rows. Times are those that an H200 needs for the FLOPs and
for the bytes of the weights.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from .arguments import HelpWithDefaults, positive
from .grouped_gemm import H200_BYTES, H200_FLOPS
from .problem import DISTRIBUTIONS, PRESETS, split_sizes
from .timing import markdown

MULTIPROCESSORS = 132
FLOP = 4096  # a cycle of a multiprocessor's tensor cores, in 16 bits
STEP = 16  # of the depth, of one wgmma
STAGE = 64  # of the depth, which is copied at a time
BANKS = 128  # bytes that shared memory moves in a cycle


class Tile(NamedTuple):
    """A tile: rows x columns of a block, blocks per cluster (stacked), `swap_ab` (csrc/device/gemm/swap_ab.cuh)."""

    rows: int
    columns: int
    cluster: int
    swap_ab: bool

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}{', swap_ab' if self.swap_ab else ''}"

    @property
    def rounding(self) -> int:
        """The multiple to which a product's rows are rounded up."""
        return 16 if self.swap_ab else 64


SHORT = (Tile(128, 256, 2, True), Tile(160, 256, 2, True), Tile(192, 256, 2, True))
BACKWARD, WGRAD = (Tile(128, 192, 2, False),), (Tile(256, 192, 1, False),)


class ProductShape(NamedTuple):
    """A product: the columns of its result and its depth; for a weight gradient, the rows of its result."""

    columns: int
    depth: int = 0
    fixed_rows: int = 0


def shapes(features: int, hidden: int) -> dict[str, tuple[ProductShape, Sequence[Tile]]]:
    """The products of the experts, each with its candidate tiles."""
    return {
        "fc1": (ProductShape(2 * hidden, features), SHORT),
        "fc2": (ProductShape(features, hidden), SHORT),
        "dgrad1": (ProductShape(features, 2 * hidden), SHORT),
        "dgrad2": (ProductShape(hidden, features), SHORT),
        "dgrad2, activation": (ProductShape(hidden, features), BACKWARD),
        "wgrad1": (ProductShape(features, fixed_rows=2 * hidden), WGRAD),
        "wgrad2": (ProductShape(hidden, fixed_rows=features), WGRAD),
    }


class Task(NamedTuple):
    """The tile of each block of a cluster: rows (a multiple of the rounding), columns, and depth."""

    rows: int
    columns: int
    depth: int

    @property
    def cycles(self) -> float:
        """The cycles of the tensor cores."""
        return 2 * self.rows * self.columns * STEP * -(-self.depth // STEP) / FLOP

    def bytes_of(self, swap_ab: bool) -> int:
        """The bytes that shared memory moves.

        A wgmma reads 64 of one side and all of the other; each stage is written once; a result is written and read.
        """
        left, right = (self.columns, self.rows) if swap_ab else (self.rows, self.columns)
        read = left // 64 * -(-self.depth // STEP) * (64 + right) * STEP
        return 2 * (read + -(-self.depth // STAGE) * (self.rows + self.columns) * STAGE + 2 * self.rows * self.columns)


def tasks(shape: ProductShape, tile: Tile, sizes: Sequence[int]) -> Iterator[Task]:
    """Every task, group by group."""
    for size in sizes:
        if shape.fixed_rows:
            yield from _of_gradient(shape, tile, size)
        elif size:
            yield from _of_rows(shape, tile, size)


def _of_gradient(shape: ProductShape, tile: Tile, size: int) -> Iterator[Task]:
    """The tasks of a weight gradient; a last column tile of at most 128 columns is computed as 128."""
    full, rest = divmod(shape.columns, tile.columns)
    widths = [tile.columns] * full + ([128 if rest <= 128 else tile.columns] if rest else [])
    for width in widths:
        yield from [Task(tile.rows, width, max(size, 1))] * -(-shape.fixed_rows // tile.rows)


def _of_rows(shape: ProductShape, tile: Tile, size: int) -> Iterator[Task]:
    """The tasks of a row product.

    A pair of tiles takes as long as the higher one; an odd last tile is split in columns.
    """
    heights, columns = heights_of(tile, size), -(-shape.columns // tile.columns)
    for i in range(0, len(heights), tile.cluster):
        pair = heights[i : i + tile.cluster]
        count = columns if len(pair) == tile.cluster else -(-columns // tile.cluster)
        yield from [Task(max(pair), tile.columns, shape.depth)] * count


def heights_of(tile: Tile, size: int) -> list[int]:
    """The rounded heights of a group's tiles; `swap_ab` shares the rows evenly."""
    blocks, count = -(-size // tile.rounding), -(-size // tile.rows)
    if not tile.swap_ab:
        return [tile.rows] * (count - 1) + [blocks * tile.rounding - (count - 1) * tile.rows]
    least, higher = divmod(blocks, count)
    return [(least + (i < higher)) * tile.rounding for i in range(count)]


def last_end(cycles: Sequence[float], blocks: int) -> float:
    """The end of the last of ``blocks`` blocks, if each takes the next task when it is free."""
    ends = [0.0] * blocks
    for each in cycles:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def row(name: str, shape: ProductShape, tile: Tile, sizes: Sequence[int]) -> list[str]:
    """One line of the table."""
    blocks, every = MULTIPROCESSORS // tile.cluster, list(tasks(shape, tile, sizes))
    cycles = [task.cycles for task in every]
    flops = 2 * sum(sizes) * shape.columns * (shape.depth or shape.fixed_rows)
    ideal = flops / FLOP / MULTIPROCESSORS
    ends = last_end(cycles, blocks), last_end(sorted(cycles, reverse=True), blocks)
    moved = sum(task.bytes_of(tile.swap_ab) for task in every) / BANKS
    weights = len(sizes) * shape.columns * (shape.depth or shape.fixed_rows) * 2
    shares = [f"{ideal / end:.2f}" for end in (sum(cycles) / blocks, *ends)] + [f"{sum(cycles) / moved:.2f}"]
    times = f"{flops / H200_FLOPS * 1e6:.0f}", f"{weights / H200_BYTES * 1e6:.0f}"
    return [name, str(tile), f"{len(every) / blocks:.1f}", *shares, *times]


HEADING = (
    "",
    "tile",
    "rounds",
    "rounded up",
    "last round",
    "highest first",
    "shared memory",
    "FLOP, µs",
    "weights, µs",
)


def table(preset: str, tokens: int, distribution: str) -> str:
    """Every product of a model with each of its candidate tiles, as Markdown."""
    p = PRESETS[preset]
    sizes = split_sizes(distribution, p.experts, tokens * p.top_k // p.ranks).tolist()
    every = shapes(p.features, p.hidden).items()
    rows = [row(name, shape, tile, sizes) for name, (shape, tiles) in every for tile in tiles]
    return f"### {preset}, {tokens} tokens, {distribution}\n\n{markdown(HEADING, rows)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for every requested preset, number of tokens and distribution."""
    args = _arguments(argv)
    for preset, tokens, distribution in product(args.preset, args.tokens, args.distribution):
        print(table(preset, tokens, distribution))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpWithDefaults)
    parser.add_argument("--preset", choices=PRESETS, nargs="+", default=["deepseek-v3-ep8", "qwen3"])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[8192])
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, nargs="+", default=["random"])
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
