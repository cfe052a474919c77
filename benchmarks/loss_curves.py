"""The demo's model trained twice from one seed, with fused kernels and with those of PyTorch: the losses must agree.

Run it with ``python -m fusible.benchmarks.loss_curves --out docs/loss_curves --plot docs/loss_curves.svg``. With
``--recipes`` its experts are trained under each recipe, or under the named ones, and for comparison in 16 bits from
parameters perturbed by a millionth. At this size a curve finds mistakes, but cannot rank recipes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

import fusible
from fusible.examples.moe_lm import LanguageModel, read_text, train
from fusible.fuser import registry

from .arguments import add_plot_argument, device, file, positive
from .plots import curves
from .recipes import RECIPES
from .report import Report
from .timing import markdown

SMOOTHED = 20  # steps
NUDGE = 1e-6
NUDGES = 3  # runs from perturbed parameters; the furthest shows how much training amplifies


class Training(NamedTuple):
    """A training from a fixed seed, under some switches.

    Attributes:
        nudge: the relative perturbation of the head's parameters.
        bf16: whether a CPU computes in bfloat16, as CUDA always does.
    """

    switches: Mapping[str, Any]
    nudge: float = 0.0
    bf16: bool = False


def losses(device: str, steps: int, jobs: int = 1) -> dict[str, list[float]]:
    """The losses of every step in nats per byte: fused, op by op on the same kernels, and op by op on the fallback.

    On CUDA the model computes in bfloat16 from float32 parameters, by autocast. Training amplifies every rounding; the
    fallback from perturbed parameters shows by how much.
    """
    fallback = "grouped_mm" if device == "cuda" else "loop"
    unfused = [fusion.name for fusion in registry]
    slowest = {"disable_fusions": unfused, "backend": fallback}
    trainings = {
        f"unfused, {fallback}, nudged": Training(slowest, NUDGE),
        "fused": Training({}),
        "unfused": Training({"disable_fusions": unfused}),
        f"unfused, {fallback}": Training(slowest),
    }
    return _losses_of(trainings, device, steps, jobs)


def recipe_losses(device: str, steps: int, names: Collection[str] = (), jobs: int = 1) -> dict[str, list[float]]:
    """The losses of every step in nats per byte, under bfloat16 autocast: perturbed runs, each recipe, and 16 bits
    last.

    Args:
        names: the recipes to train; all of them if empty.
    """
    recipes = {name: RECIPES[name] for name in names or RECIPES}
    nudged = {f"nudged {i}": Training({}, i * NUDGE, bf16=True) for i in range(1, NUDGES + 1)}
    quantised = {name: Training({"recipe": recipe}, bf16=True) for name, recipe in recipes.items()}
    return _losses_of({**nudged, **quantised, "16 bits": Training({}, bf16=True)}, device, steps, jobs)


def _losses_of(trainings: Mapping[str, Training], device: str, steps: int, jobs: int) -> dict[str, list[float]]:
    """The losses of each training, in ``jobs`` processes that share the device.

    The last ones start first, as they take longest.
    """
    if jobs == 1:
        return {name: _losses(name, training, device, steps) for name, training in trainings.items()}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        started = {name: pool.submit(_losses, name, trainings[name], device, steps) for name in [*trainings][::-1]}
        return {name: started[name].result() for name in trainings}


def _losses(name: str, training: Training, device: str, steps: int) -> list[float]:
    """The losses of one training. Prints a line at its end, so an interrupted run keeps the finished ones."""
    began = time.perf_counter()
    values = _trained(training, device, steps)
    print(f"{name}: {smoothed(values)[-1]:.4f}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return values


def _trained(training: Training, device: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    model, text = LanguageModel().to(device), read_text()
    with torch.no_grad():
        model.head.weight *= 1 + training.nudge
    amp = torch.autocast(device, torch.bfloat16, enabled=training.bf16 or device == "cuda")
    silent = contextlib.redirect_stdout(io.StringIO())
    with fusible.config(**training.switches), amp, silent:
        return train(model, text, 0, steps)


def smoothed(values: Sequence[float]) -> torch.Tensor:
    """The means of all windows of :data:`SMOOTHED` neighbouring values."""
    return torch.tensor(values).unfold(0, min(SMOOTHED, len(values)), 1).mean(1)


def apart(by_name: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The largest distance of each smoothed curve from the last one."""
    *_, last = by_name.values()
    return {name: float((smoothed(v) - smoothed(last)).abs().max()) for name, v in by_name.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints a table, draws."""
    parser = argparse.ArgumentParser(prog="loss_curves", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument(
        "--recipes",
        nargs="*",
        choices=RECIPES,
        metavar="RECIPE",
        help="train by these for quantised products, or by all",
    )
    parser.add_argument("--jobs", type=positive, default=1, help="trainings at a time, each a process")
    parser.add_argument("--out", type=file, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well")
    add_plot_argument(parser)
    args = parser.parse_args(argv)
    by_recipes = args.recipes is not None
    began = time.perf_counter()
    options = args.device, args.steps
    by_name = recipe_losses(*options, args.recipes, args.jobs) if by_recipes else losses(*options, args.jobs)
    took = f"{len(by_name)} runs in {time.perf_counter() - began:.0f} s"
    far_from = "16 bits" if by_recipes else "the fallback"
    heading = ("loss, nats a byte", "first step", f"mean of the last {SMOOTHED}", f"apart from {far_from}, at most")
    rows = []
    for (name, values), far in zip(by_name.items(), apart(by_name).values(), strict=True):
        rows.append((name, f"{values[0]:.4f}", f"{smoothed(values)[-1]:.4f}", f"{far:.4f}"))
    Report(args.out).add(f"{markdown(heading, rows)}\n\n{took}", [{"losses": by_name}])
    if args.plot:
        curves(args.plot, by_name, f"the demo's model, {args.steps} steps, {args.device}", "step", "loss, nats a byte")


if __name__ == "__main__":
    main()
