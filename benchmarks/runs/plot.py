"""Draws speed and peak memory from what ``bench train`` and ``bench generate`` wrote with ``--out``.

``python -m fusible.benchmarks.runs.plot one.json another.json runs.svg`` draws several files; ``--plot`` draws one run.
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

Number = tuple[str, str, str, float]  # unit, group, name, value
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
    """The numbers by unit, by model, by contestant; without activation checkpointing."""
    by_unit: Values = {}
    for report in reports:
        for run in report["results"]:
            ran = [one for one in run["contestants"] if "failure" not in one]
            training = [one for one in ran if "decode" not in one and not one.get("checkpointing")]
            gpus = f"{run['preset']}\n{run['ranks']} GPU{'s' if run['ranks'] > 1 else ''}"
            serving = [one for one in ran if "decode" in one]
            for unit, group, name, value in [*_training(gpus, training), *_serving(run["preset"], serving)]:
                by_unit.setdefault(unit, {}).setdefault(group, {})[name] = value
    return by_unit


def _training(group: str, ran: Sequence[Mapping[str, Any]]) -> Iterator[Number]:
    for one in ran:
        yield SPEED, group, one["name"], one["tokens"] / sum(one["seconds"].values()) / 1e3
        yield PEAK, group, one["name"], one["peak"] / 1e9


def _serving(preset: str, ran: Sequence[Mapping[str, Any]]) -> Iterator[Number]:
    """The decode of fewest prompts; prefill, which is not compiled, and peak of the most that all served."""
    for one in ran:
        fewest, seconds = next(iter(one["decode"].items()))
        yield DECODE, _group(preset, fewest), one["name"], int(fewest) / seconds
    eager = [one for one in ran if "compile" not in one["name"]]
    served_by_all = set[str].intersection(*(set(one["prefill"]) for one in eager)) if eager else set()
    if not served_by_all:
        return
    most = max(served_by_all, key=int)
    group = _group(preset, most)
    for one in eager:
        yield PREFILL, group, one["name"], int(most) * one["prompt"] / one["prefill"][most] / 1e3
        yield SERVING_PEAK, group, one["name"], one["peak"][most] / 1e9


def _group(preset: str, prompts: str) -> str:
    return f"{preset}\n{prompts} prompt{'s' if int(prompts) > 1 else ''}"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the reports, writes the drawing."""
    parser = argparse.ArgumentParser(prog="plot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reports", type=file, nargs="+", help="what --out wrote, PREFIX.json")
    parser.add_argument("plot", type=plot)
    args = parser.parse_args(argv)
    draw(args.plot, *(read_json(parser, report, "commit", "gpu", "results") for report in args.reports))


if __name__ == "__main__":
    main()
