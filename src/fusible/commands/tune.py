"""Measures Triton's tiles on this card, and keeps the fastest for later runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..benchmarks import timing
from ..benchmarks.arguments import command, duration, positive
from ..ops.kernels.triton import tuned
from ..ops.kernels.triton.installed import triton_refusal


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    parser = command("tune", __doc__)
    parser.add_argument("--seconds", type=duration, default=60.0, help="how long to try")
    parser.add_argument("--experts", type=positive, default=16)
    parser.add_argument("--hidden", type=positive, default=2048, help="features of a token")
    parser.add_argument("--features", type=positive, default=1024, help="features inside an expert")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (why := triton_refusal(torch.empty(0, device=device))) is not None:
        parser.error(f"triton {why}")
    report = run(device, (args.experts, args.hidden, args.features), args.seconds)
    print(json.dumps(report, indent=1) if args.json else "\n".join(lines(report)))


def run(device: torch.device, layer: tuple[int, int, int], seconds: float) -> dict[str, Any]:
    """Measures and keeps; returns what was found as a dict."""
    from ..ops.kernels.triton.device import tune

    found = list(tune.measure(tune.Layer(*layer), device, seconds, _clock(device)))
    why = tuned.keep(device, {(each.kind, each.few): each.tile for each in found})
    rows = [{**each._asdict(), "tile": each.tile._asdict()} for each in found]
    return {"device": torch.cuda.get_device_name(device), "not_kept": why, "products": rows}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """What was found as lines of text."""
    yield report["device"]
    for each in report["products"]:
        tile, rows = each["tile"], "few rows" if each["few"] else "many rows"
        yield (
            f"{each['kind']:18}{rows:10} {tile['m']} x {tile['n']} x {tile['k']}, {tile['warps']} warps, "
            f"{tile['stages']} stages: {each['of_table'] / each['seconds']:.2f} x the table's, of {each['tried']}"
        )
    if report["not_kept"]:
        yield f"not kept: {report['not_kept']}"


def _clock(device: torch.device) -> Callable[[Callable[[], None]], float]:
    return lambda function: timing.interleaved({"": function}, 5, device, calls=3)[""]
