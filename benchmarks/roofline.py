"""How near the kernels come to the device's limits: FLOP per byte, and the bound that follows.

    python -m fusible roofline                                            all presets on a GPU
    python -m fusible roofline --preset qwen3 --tokens 64 8192 --plot roofline.svg

The two ceilings are measured first: the bandwidth of a large copy, reads plus writes, and the speed of a large matrix
product. The bound of a product is min(peak, FLOP per byte x bandwidth), with every operand read once and the result
written once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .arguments import add_plot_argument, command
from .gemm_contestants import CONTESTANTS, products, refusal
from .grouped_gemm import YARDSTICK, bytes_moved, measure
from .plots import Point, roofline
from .problem import DTYPES, Asked, add_asked_arguments, asked
from .report import Report, describe
from .timing import interleaved, markdown

SIDE, COPIED = 8192, 2**30  # on a CPU an eighth, and a sixteenth


class Ceilings(NamedTuple):
    """The peak speeds of the device."""

    flops: float  # a second
    bandwidth: float  # bytes a second, read and written

    def bound(self, flops: int, moved: int) -> float:
        """The upper bound in FLOP/s for ``flops`` operations on ``moved`` bytes."""
        return min(self.flops, flops / moved * self.bandwidth)


def ceilings(device: str, dtype: torch.dtype, rounds: int) -> Ceilings:
    """Measures them, on random data."""
    cuda = torch.device(device).type == "cuda"
    side, copied = (SIDE, COPIED) if cuda else (SIDE // 8, COPIED // 16)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.randint(256, (copied,), dtype=torch.uint8, device=device)
    out, target = torch.empty_like(a), torch.empty_like(source)
    functions = {"product": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
    seconds = interleaved(functions, rounds, device, calls=2, steady=True)
    return Ceilings(2 * side**3 / seconds["product"], 2 * copied / seconds["copy"])


def findings(case: Asked, roof: Ceilings, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every product of the experts: FLOP per byte, speed, and upper bound."""
    results = []
    for name, p in products(case.problem, args.main_grad):
        functions = {who: CONTESTANTS[who](p) for who in args.contestants if refusal(who, p) is None}
        print(f"{case}: {name} …", file=sys.stderr, flush=True)
        measured, moved = measure(p, functions, args.rounds), bytes_moved(p)
        speeds = {who: p.flops / m.seconds for who, m in measured.items()}
        bound = roof.bound(p.flops, moved)
        results.append({"product": name, "intensity": p.flops / moved, "bound": bound, "flops_per_second": speeds})
    return results


def table(results: Sequence[Mapping[str, Any]], contestants: Sequence[str]) -> str:
    """The findings as Markdown: speeds in TFLOP/s, and as shares of the bound."""
    heading = ("", "FLOP a byte", "bound, TFLOP/s", *contestants, *(f"{who} / bound" for who in contestants))
    rows = []
    for f in results:
        speeds = [f["flops_per_second"].get(who) for who in contestants]
        shown = [f"{s / 1e12:.4g}" if s else "" for s in speeds] + [
            f"{s / f['bound']:.2f}" if s else "" for s in speeds
        ]
        rows.append((f["product"], f"{f['intensity']:.4g}", f"{f['bound'] / 1e12:.4g}", *shown))
    return markdown(heading, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the ceilings, then every product of every preset, number of tokens and distribution; prints Markdown."""
    args = _arguments(argv)
    roof = ceilings(args.device, DTYPES[args.dtype], args.rounds)
    points: dict[str, list[Point]] = {who: [] for who in args.contestants}
    with Report(args.out, args.json) as report:
        report.say(f"Ceilings: {roof.flops / 1e12:.4g} TFLOP/s, {roof.bandwidth / 1e12:.3g} TB/s.\n")
        for case in asked(args):
            results = findings(case, roof, args)
            section = f"### {case}: {describe(case.problem)}\n\n{table(results, args.contestants)}"
            report.add(section, [{**case.about(), "ceilings": roof._asdict(), "products": results}])
            for f in results:
                for who, speed in f["flops_per_second"].items():
                    points[who].append(Point(f["product"], f["intensity"], speed))
    if args.plot:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        roofline(args.plot, points, *roof, f"products of the experts, {args.dtype}, {where}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = command("roofline", __doc__)
    add_asked_arguments(parser, [64, 8192], CONTESTANTS, rounds=5)
    peers = [who for who in ("ours", "grouped_mm") if cuda or who == "ours"]
    parser.set_defaults(contestants=[*peers, YARDSTICK])
    add_plot_argument(parser)
    return parser.parse_args(argv)
