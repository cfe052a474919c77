"""Plots times and memory of the demo's experts from its data, relative to the unfused ones.

python -m fusible demo --json > demo.json
python -m fusible.benchmarks.demo_plot demo.json docs/plots/demo.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import file, plot, read_json
from .plots import bars

LABELS = {
    "fused": "fusible, fused",
    "unfused": "fusible, op by op",
    "grouped_mm": "PyTorch's grouped_mm",
    "loop": "a loop over experts",
}
MEASURES = {
    "seconds": "time, forward + backward",
    "peak_bytes": "peak memory",
    "kept_bytes": "memory kept for the backward",
}


def shares(comparison: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Each measure of each contestant, divided by the measure of the unfused experts."""
    whole = comparison["unfused"]
    return {
        title: {LABELS[name]: measures[measure] / whole[measure] for name, measures in comparison.items()}
        for measure, title in MEASURES.items()
    }


def title(data: Mapping[str, Any]) -> str:
    """The title: the problem and where it was measured."""
    return f"The experts of the demo: {data['problem']}"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the data, writes the drawing."""
    parser = argparse.ArgumentParser(prog="demo_plot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=file, help="what `fusible demo --json` has printed")
    parser.add_argument("plot", type=plot)
    args = parser.parse_args(argv)
    data = read_json(parser, args.data, "comparison", "problem")
    bars(args.plot, shares(data["comparison"]), title(data), "part of that op by op; less is better")


if __name__ == "__main__":
    main()
