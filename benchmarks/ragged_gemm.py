"""Groups of any shapes: one launch against a loop that reads them from the device; for equal shapes also grouped GEMM.

Run it with ``python -m fusible.benchmarks.ragged_gemm``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusible import GroupedTensor, config, grouped_gemm
from fusible.ops.kernels.problems.gemm import Layout

from .arguments import device, positive
from .problem import InaccurateError
from .timing import interleaved, markdown

Shapes = list[tuple[int, int, int]]  # m, n, k of each group
KINDS = ("equal", "multiples of 8", "multiples of 2", "any")


def shapes_of(kind: str, groups: int, size: int) -> Shapes:
    """Random shapes of about ``size`` rows, columns and depth, within half of it unless they are equal."""
    if kind == "equal":
        return [(size, size, size)] * groups
    step = {"multiples of 8": 8, "multiples of 2": 2, "any": 1}[kind]
    shuffler = random.Random(0)

    def pick() -> int:
        return max(step, shuffler.randrange(size // 2, size + size // 2) // step * step)

    return [(pick(), pick(), pick()) for _ in range(groups)]


def operands(layout: Layout, shapes: Shapes, dtype: torch.dtype, device: str) -> tuple[GroupedTensor, GroupedTensor]:
    """Random matrices; their dims are on the device."""

    def grouped(dims: Sequence[tuple[int, int]], scale: float) -> GroupedTensor:
        first, last = (torch.tensor([pair[i] for pair in dims], device=device) for i in (0, 1))
        data = torch.randn(sum(rows * columns for rows, columns in dims), device=device, dtype=dtype) * scale
        return GroupedTensor(data, first, last)

    a = [(k, m) if layout is Layout.TN else (m, k) for m, _, k in shapes]
    b = [(n, k) if layout is Layout.NT else (k, n) for _, n, k in shapes]
    return grouped(a, 1.0), grouped(b, max(k for _, _, k in shapes) ** -0.5)


def contestants(layout: Layout, shapes: Shapes, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the product into their own buffers."""
    a, b = operands(layout, shapes, dtype, device)
    rooms = [torch.empty(sum(m * n for m, n, _ in shapes), device=device, dtype=dtype) for _ in range(2)]

    def one_launch() -> Tensor:
        grouped_gemm(a, b, layout=layout.value, out=rooms[0])
        return rooms[0]

    def loop() -> Tensor:
        with config(backend="loop"):
            grouped_gemm(a, b, layout=layout.value, out=rooms[1])
        return rooms[1]

    if len(set(shapes)) > 1:
        return {"one launch": one_launch, "loop": loop}
    (m, n, k), groups = shapes[0], len(shapes)
    sizes = torch.full((groups,), k if layout is Layout.TN else m, device=device)
    rows, columns = a.data.view(-1, m if layout is Layout.TN else k), n if layout is not Layout.NT else k
    other = b.data.view(-1, n) if layout is Layout.TN else b.data.view(groups, -1, columns)
    out = torch.empty((groups, m, n) if layout is Layout.TN else (groups * m, n), device=device, dtype=dtype)

    def grouped() -> Tensor:
        grouped_gemm(rows, other, sizes, layout=layout.value, out=out)
        return out.view(-1)

    return {"one launch": one_launch, "loop": loop, "grouped GEMM": grouped}


def check(functions: dict[str, Callable[[], Tensor]]) -> None:
    """Checks that all agree with the loop, which multiplies with torch.

    Raises:
        InaccurateError: a result differs.
    """
    want = functions["loop"]().double()
    for name, function in functions.items():
        error = float((function().double() - want).norm() / want.norm())
        if not error < 1e-2:
            raise InaccurateError(f"{name}: relative error {error:.2g}")


def measure(kind: str, groups: int, size: int, rounds: int, dtype: torch.dtype, device: str) -> list[list[str]]:
    """A row of the table for each layout."""
    shapes, rows = shapes_of(kind, groups, size), []
    flops = sum(2 * m * n * k for m, n, k in shapes)
    for layout in Layout:
        functions = contestants(layout, shapes, dtype, device)
        check(functions)
        seconds = interleaved(functions, rounds, device, calls=4, steady=True)
        ours = seconds["one launch"]
        speeds = [f"{flops / seconds[name] / 1e12:.4g}" if name in seconds else "" for name in NAMES]
        ratios = [f"{seconds[name] / ours:.3f}" if name in seconds else "" for name in NAMES[1:]]
        rows.append([f"{kind}, {layout.value}, E={groups}, about {size}", *speeds, *ratios])
    return rows


NAMES = ("one launch", "loop", "grouped GEMM")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--sizes", nargs="+", default=["8x4096", "8x2048", "64x512"], metavar="GROUPSxSIZE")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    rows = []
    for sizes in arguments.sizes:
        groups, size = map(int, sizes.split("x"))
        for kind in KINDS:
            options = arguments.rounds, getattr(torch, arguments.dtype), arguments.device
            rows += measure(kind, groups, size, *options)
    heading = [
        "shapes",
        *(f"{name}, TFLOP/s" for name in NAMES),
        "time of the loop / ours",
        "of the grouped GEMM / ours",
    ]
    print(markdown(heading, rows))


if __name__ == "__main__":
    main()
