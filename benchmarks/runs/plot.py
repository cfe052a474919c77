"""Draws speed and peak memory from what ``bench train`` and ``bench generate`` wrote with ``--out``.

Run it with ``python -m fusible.benchmarks.runs.plot train.json generate.json docs/plots/runs.svg``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..arguments import file, plot, read_json
from ..plots import Groups, panels

SPEED, PEAK = "training, 1000 tokens/s a GPU", "training, peak GB"
PREFILL, DECODE, SERVING_PEAK = "prefill, 1000 tokens/s", "decode, tokens/s", "generation, peak GB"

Values = dict[str, dict[str, dict[str, float]]]


def draw(target: Path, *reports: Mapping[str, Any]) -> None:
    """Draws the contestants of all reports; the title names where and at which commits they were measured.

    Raises:
        SystemExit: a report names no commit, or nothing ran.
    """
    commits = list(dict.fromkeys(report["commit"] for report in reports))
    if None in commits:
        raise SystemExit("a report names no commit: measure in a checkout, where git runs")
    drawn = values(reports)
    if not drawn:
        raise SystemExit("nothing to draw: no contestant ran")
    where = " and ".join(dict.fromkeys(report["gpu"] or "CPU" for report in reports))
    panels(target, drawn, f"slices of language models, {where}, commit {' and '.join(map(str, commits))}")


def values(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Groups]:
    """The numbers by unit, by model and GPUs, by contestant; without activation checkpointing."""
    by_unit: Values = {}
    for report in reports:
        for run in report["results"]:
            for unit, group, name, value in _numbers(run):
                by_unit.setdefault(unit, {}).setdefault(group, {})[name] = value
    return by_unit


def _numbers(run: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    group = f"{run['preset']}\n{run['ranks']} GPU{'s' if run['ranks'] > 1 else ''}"
    for one in run["contestants"]:
        if "failure" in one or one.get("checkpointing"):
            continue
        for unit, value in (_serving if "decode" in one else _training)(one):
            yield unit, group, one["name"], value


def _training(one: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield SPEED, one["tokens"] / sum(one["seconds"].values()) / 1e3
    yield PEAK, one["peak"] / 1e9


def _serving(one: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The decode of fewest prompts, the prefill of most, and its peak, which are not compiled; the tables have all."""
    batches: list[str] = [*one["decode"], *one["prefill"]]
    fewest, most = batches[0], batches[-1]
    yield f"{DECODE}, batch {fewest}", int(fewest) / one["decode"][fewest]
    if "compile" not in one["name"]:
        yield f"{PREFILL}, batch {most}", int(most) * one["prompt"] / one["prefill"][most] / 1e3
        yield SERVING_PEAK, one["peak"] / 1e9


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the reports, writes the drawing."""
    parser = argparse.ArgumentParser(prog="plot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reports", type=file, nargs="+", help="what --out wrote, PREFIX.json")
    parser.add_argument("plot", type=plot)
    args = parser.parse_args(argv)
    draw(args.plot, *(read_json(parser, report, "commit", "gpu", "results") for report in args.reports))


if __name__ == "__main__":
    main()
