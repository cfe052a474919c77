"""The experts of a layer: fused plan, unfused plan, and hand-written code. Accuracy first, then speed.

    python -m fusible bench mlp                                   on this machine, small sizes
    python -m fusible bench mlp --preset mixtral --tokens 8192    on a GPU

Times are medians of interleaved rounds in one run, on a GPU each right after an untimed call of the same, as in a
training. ``inference`` is a forward without grad. ``dense`` is one product of as many operations instead of each
grouped one, and no activation: a yardstick, not a peer. The error is the largest, over output and gradients, of the
relative error against float64 arithmetic on the same rounded inputs.

Other libraries take part where they can be imported: ``--contestants fused quack sonicmoe``. One that fails, or whose
results are wrong, is left out, with the reason below the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .arguments import add_plot_argument, command
from .contestant import Contestant
from .contestants import CONTESTANTS, race, refusal, under_recipe
from .left_out import LeftOut, footer
from .peers import PEERS
from .peers.peer import in_one_line
from .plots import bars
from .problem import DTYPES, InaccurateError, Problem, add_run_arguments, add_size_arguments, sizes_of, split_sizes
from .recipes import RECIPES
from .report import Report, describe
from .timing import interleaved, markdown, peak_bytes

YARDSTICK = "dense"  # computes something else: it has no error
PARTS = {"inference": "inference", "forward": "forward", "backward": "backward", "step": "both"}


class MLPMeasurement(NamedTuple):
    """Seconds, bytes and the largest relative error of one contestant."""

    inference: float
    forward: float
    backward: float
    step: float
    peak: int
    error: float | None


def check(problem: Problem, contestants: Mapping[str, Contestant]) -> dict[str, float]:
    """The largest relative error of each contestant.

    Raises:
        InaccurateError: the error of a tensor exceeds twice that of the loop in the same dtype.
    """
    tiny = 8 * torch.finfo(problem.x.dtype).eps
    errors = {name: problem.errors(c.result()) for name, c in contestants.items() if name != YARDSTICK}
    allowed = {name: 2 * error + tiny for name, error in errors.get("loop", {}).items()}
    for name, by_tensor in errors.items():
        rounding = contestants[name].rounding
        bad = {t: error for t, error in by_tensor.items() if not error <= allowed.get(t, tiny) + rounding}  # or NaN
        if bad:
            raise InaccurateError(f"{name}: relative errors {bad}, allowed {allowed or tiny}")
    return {name: max(by_tensor.values()) for name, by_tensor in errors.items()}


def peer(name: str, problem: Problem) -> Contestant | LeftOut:
    """Another library as a contestant, after a step whose results were checked."""
    try:
        contestant = PEERS[name].contestant(problem)
        check(problem, {name: contestant})
    except InaccurateError as error:
        return LeftOut(name, f"wrong ({str(error).removeprefix(f'{name}: ')})")
    except Exception as error:  # whatever a library raises, the others are timed
        return LeftOut(name, f"failed ({in_one_line(error)})")
    return contestant


def taking_part(problem: Problem, names: Sequence[str]) -> tuple[dict[str, Contestant], list[LeftOut]]:
    """The named contestants that can run here, and the reasons why the others cannot."""
    reasons = {name: why for name in names if (why := refusal(name, problem))}
    contestants, left_out = race(problem, [n for n in names if n not in PEERS]), [LeftOut(*r) for r in reasons.items()]
    for name in names:
        if name in PEERS and name not in reasons:
            entrant = peer(name, problem)
            if isinstance(entrant, LeftOut):
                left_out.append(entrant)
            else:
                contestants[name] = entrant
    return contestants, left_out


def measure(problem: Problem, contestants: Mapping[str, Contestant], rounds: int) -> dict[str, MLPMeasurement]:
    """Checks, then times every contestant."""
    errors, device = check(problem, contestants), problem.x.device

    def timed(part: str, **options: Any) -> dict[str, float]:
        functions = {name: getattr(c, part) for name, c in contestants.items()}
        return interleaved(functions, rounds, device, steady=problem.x.is_cuda, **options)

    inference, forward, step = timed("infer"), timed("forward"), timed("step")
    backward = timed("backward", prepare={name: c.forward for name, c in contestants.items()})
    peaks = {name: peak_bytes(c.step, device) for name, c in contestants.items()}
    return {
        name: MLPMeasurement(inference[name], forward[name], backward[name], step[name], peaks[name], errors.get(name))
        for name in contestants
    }


def table(problem: Problem, measured: Mapping[str, MLPMeasurement]) -> str:
    """The measurements as Markdown; speeds relative to the yardstick and to the loop, where they were measured."""
    heading = [f"{part}, ms" for part in PARTS.values()]
    heading += [f"{part} / dense" for part in PARTS.values()] if YARDSTICK in measured else []
    heading += ["speed / loop"] if "loop" in measured else []
    rows = []
    for name, m in measured.items():
        times = [f"{getattr(m, part) * 1e3:.3f}" for part in PARTS]
        if YARDSTICK in measured:
            times += [f"{getattr(measured[YARDSTICK], part) / getattr(m, part):.2f}" for part in PARTS]
        times += [f"{measured['loop'].step / m.step:.2f}"] if "loop" in measured else []
        speed, error = 3 * problem.flops / m.step / 1e12, "" if m.error is None else f"{m.error:.1e}"
        rows.append((name, *times, f"{speed:.3g}", f"{m.peak / 1e6:.1f}", error))
    return markdown(("", *heading, "TFLOP/s", "peak memory, MB", "error"), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every requested distribution, and prints Markdown."""
    args = _arguments(argv)
    speeds: dict[str, dict[str, float]] = {}
    with Report(args.out, args.json) as report:
        for distribution in args.distribution:
            problem = _problem(args, distribution)
            speeds[distribution] = _measure_problem(problem, distribution, args, report)
    if args.plot:
        bars(args.plot, speeds, f"experts, forward and backward: {describe(problem)}", "TFLOP/s")


def _problem(args: argparse.Namespace, distribution: str) -> Problem:
    experts, features, hidden, rows = sizes_of(args)
    splits = split_sizes(distribution, experts, rows)
    return Problem.make(experts, features, hidden, splits, args.device, DTYPES[args.dtype])


def _measure_problem(problem: Problem, distribution: str, args: argparse.Namespace, report: Report) -> dict[str, float]:
    """Measures and reports the contestants; returns their TFLOP/s."""
    contestants, left_out = taking_part(problem, args.contestants)
    contestants |= {f"fused, {recipe}": under_recipe(problem, recipe) for recipe in args.recipe}
    print(f"{distribution}: {', '.join(contestants)} …", file=sys.stderr, flush=True)
    measured = measure(problem, contestants, args.rounds)
    text = "\n".join(
        filter(None, [f"### {describe(problem)}, {distribution}\n", table(problem, measured), footer(left_out)])
    )
    about = {"problem": describe(problem), "distribution": distribution}
    data = {"contestants": {n: m._asdict() for n, m in measured.items()}, "left_out": [o.about() for o in left_out]}
    report.add(text, [{**about, **data}])
    return {name: 3 * problem.flops / m.step / 1e12 for name, m in measured.items()}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command("bench mlp", __doc__)
    add_size_arguments(parser, tokens=1024)
    add_run_arguments(parser, [*CONTESTANTS, *PEERS], rounds=30)
    parser.add_argument("--recipe", choices=RECIPES, nargs="+", default=[], help="also the fused experts under these")
    add_plot_argument(parser)
    args = parser.parse_args(argv)
    if args.recipe and args.dtype == "fp32":
        parser.error("--recipe quantises bf16 or fp16: give --dtype bf16")
    return args


if __name__ == "__main__":
    main()
