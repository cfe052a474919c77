"""Plots of measurements, as SVG or PNG by the name of the file. Needs matplotlib: ``pip install matplotlib``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A measurement in a roofline plot: FLOP per byte, FLOP/s."""

    name: str
    intensity: float
    flops: float


Groups = Mapping[str, Mapping[str, float]]


def bars(file: Path, groups: Groups, title: str, unit: str) -> None:
    """Bars side by side, for each name of each group; a gap where a group lacks a name."""
    figure, axes = _figure(title)
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    _bars(axes, groups, names, unit)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)  # inside, it would hide bars
    _save(figure, [axes], file)


def panels(file: Path, by_unit: Mapping[str, Groups], title: str) -> None:
    """Such bars for each unit, one panel below the other; a name has the same colour in all."""
    figure, several = _figure(title, len(by_unit))
    names = list(dict.fromkeys(name for groups in by_unit.values() for group in groups.values() for name in group))
    for axes, (unit, groups) in zip(several, by_unit.items(), strict=True):
        _bars(axes, groups, names, unit)
        axes.margins(y=0.15)  # for the numbers above bars
    figure.legend(*several[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    _save(figure, several, file)


def _bars(axes: Any, groups: Groups, names: Sequence[str], unit: str) -> None:
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [group.get(name, math.nan) for group in groups.values()]
        drawn = axes.bar([g + i * width for g in range(len(groups))], heights, width, label=name)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7)
    axes.set_xticks([g + 0.4 - width / 2 for g in range(len(groups))], list(groups))
    axes.set_ylabel(unit)


def roofline(file: Path, points: Mapping[str, Sequence[Point]], peak: float, bandwidth: float, title: str) -> None:
    """Points under the roof that ``peak`` (FLOP/s) and ``bandwidth`` (bytes/s) make; both axes logarithmic."""
    figure, axes = _figure(title)
    ridge, everything = peak / bandwidth, [p for some in points.values() for p in some]
    left = min([p.intensity for p in everything] + [ridge]) / 2
    right = max([p.intensity for p in everything] + [ridge]) * 2
    roof = [bandwidth * left / 1e12, peak / 1e12, peak / 1e12]
    axes.loglog([left, ridge, right], roof, color="black", linewidth=1, label="roof")
    for (name, some), marker in zip(points.items(), "osv^D*xP", strict=False):
        axes.loglog([p.intensity for p in some], [p.flops / 1e12 for p in some], marker, label=name, alpha=0.7)
    axes.set_xlabel("FLOP a byte")
    axes.set_ylabel("TFLOP/s")
    _write(figure, axes, file)


def curves(file: Path, lines: Mapping[str, Sequence[float]], title: str, x: str, y: str) -> None:
    """Draws curves over the index of the value; the first one is broad, so that others on top of it can be seen."""
    figure, axes = _figure(title)
    for i, (name, values) in enumerate(lines.items()):
        axes.plot(
            range(1, len(values) + 1), values, label=name, linewidth=4 if i == 0 else 1, alpha=0.5 if i == 0 else 1
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _write(figure, axes, file)


def _figure(title: str, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(9, 5 if rows == 1 else 2.5 * rows), layout="constrained")
    axes = figure.subplots(rows)
    (axes if rows == 1 else axes[0]).set_title(title, fontsize=9)
    return figure, axes


def _write(figure: Any, axes: Any, file: Path) -> None:
    axes.legend(fontsize=8)
    _save(figure, [axes], file)


def _save(figure: Any, several: Sequence[Any], file: Path) -> None:
    from matplotlib import rc_context

    for axes in several:
        axes.grid(alpha=0.3)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusible"}):  # text as text; the same file every time
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
