"""Measures Triton's tiles on this card, and keeps those that beat the table's by 5 % for later runs."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..benchmarks import timing
from ..benchmarks.arguments import command, duration, positive
from ..ops.kernels.triton import tuned
from ..ops.kernels.triton.installed import triton_refusal

if TYPE_CHECKING:
    from ..ops.kernels.triton.device import tune


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    parser = command("tune", __doc__)
    parser.add_argument("--seconds", type=duration, default=60.0, help="how long to try")
    parser.add_argument("--experts", type=positive, default=32)
    parser.add_argument("--hidden", type=aligned, default=2048, help="features of a token")
    parser.add_argument("--features", type=aligned, default=1024, help="features inside an expert")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (why := triton_refusal(torch.empty(0, device=device))) is not None:
        parser.error(f"triton {why}")
    fastest, why = run(device, (args.experts, args.hidden, args.features), args.seconds)
    if args.json:
        products = [{**each._asdict(), "tile": each.tile._asdict(), "kept": each.is_clearly_faster} for each in fastest]
        print(json.dumps({"device": torch.cuda.get_device_name(device), "not_kept": why, "products": products}))
    else:
        kept = [] if why is None else [f"not kept: it {why}"]
        print("\n".join([torch.cuda.get_device_name(device), *map(line, fastest), *kept]))


def aligned(text: str) -> int:
    """A number of features whose rows are multiples of 16 bytes: tiles that are measured serve no others."""
    if (features := positive(text)) % 8:
        raise ArgumentTypeError(f"expected a multiple of 8, got {text!r}")
    return features


def run(device: torch.device, sizes: tuple[int, int, int], seconds: float) -> tuple[list[tune.TunedTile], str | None]:
    """Measures tiles and keeps those that are clearly faster than the table's, which has some for more numbers of rows.

    Returns the fastest tiles, and why none could be kept, if none could.
    """
    from ..ops.kernels.triton.device import tune

    fastest = list(tune.measure(tune.ExpertSizes(*sizes), device, seconds, _clock(device)))
    return fastest, tuned.keep(device, {(each.kind, each.few): each.tile for each in fastest if each.is_clearly_faster})


def line(product: tune.TunedTile) -> str:
    """The tile of a product as a line of text."""
    p, rows = product, "few rows" if product.few else "many rows"
    apart = ", epilogue apart" if p.tile.apart else ""
    speedup = "the table's fails" if p.of_table is None else f"{p.of_table / p.seconds:.2f} x as fast as the table's"
    kept = "" if p.is_clearly_faster else ", which is kept"
    return (
        f"{p.kind:18}{rows:10} {p.tile.m} x {p.tile.n} x {p.tile.k}, {p.tile.warps} warps, "
        f"{p.tile.stages} stages{apart}: {speedup}{kept}; {p.tried} tried"
    )


def _clock(device: torch.device) -> Callable[[Callable[[], None]], float]:
    """Seconds of a call, within a CUDA graph of several, so that launches by the host are not timed."""

    def seconds(function: Callable[[], None]) -> float:
        return timing.interleaved({"": timing.graph_of(function, _CALLS)}, 5, device, steady=True)[""] / _CALLS

    return seconds


_CALLS = 8
