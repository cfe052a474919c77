"""Draws the plot of the README from the tables in docs/measured.md, the only place of the numbers.

Run it with ``python -m fusible.benchmarks.measured_plot docs/measured.md docs/plots/experts.svg``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from .arguments import file, plot
from .plots import bars

SECTION = "Experts on the GPU"
TITLE = "Experts of an MoE layer, forward and backward, bf16, one H200"
LABELS = {
    "fused": "fusible",
    "grouped_mm+compile": "grouped_mm + torch.compile",
    "grouped_mm": "grouped_mm",
    "loop-on-streams": "a loop on four streams",
    "sonicmoe": "SonicMoE",
    "quack": "QuACK",
    "deepgemm": "DeepGEMM",
    "scattermoe": "ScatterMoE",
    "liger": "Liger Kernel",
    "transformer_engine": "TransformerEngine",
    "dense": "one dense GEMM each, no activation",
}


def tables(page: str, section: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Heading and rows of each table of a section, whose first column is called ``""``."""
    body = re.split(r"^## ", page.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
    for part in body.split("\n### ")[1:]:
        heading, *lines = part.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        names, _, *table_rows = rows
        yield heading, [dict(zip(names, row, strict=True)) for row in table_rows]


def speeds(page: str) -> dict[str, dict[str, float]]:
    """TFLOP/s by model and contestant, for the contestants of :data:`LABELS` in the table."""
    by_model = {}
    for heading, rows in tables(page, SECTION):
        by_name = {row[""]: float(row["TFLOP/s"]) for row in rows}
        by_model[_short(heading)] = {label: by_name[name] for name, label in LABELS.items() if name in by_name}
    return by_model


def _short(heading: str) -> str:
    """The model and the number of tokens, on two lines."""
    model, _, tokens = heading.partition(":")[0].rpartition(", ")
    return f"{model}\n{tokens}"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the page, writes the drawing."""
    parser = argparse.ArgumentParser(prog="measured_plot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=file)
    parser.add_argument("plot", type=plot)
    args = parser.parse_args(argv)
    bars(args.plot, speeds(args.page.read_text()), TITLE, "TFLOP/s")


if __name__ == "__main__":
    main()
