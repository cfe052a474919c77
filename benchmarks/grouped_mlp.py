"""The experts of a layer: fused plan, unfused plan, and what people write by hand. Accuracy first, then speed.

    python -m fusible bench mlp                                   on this machine, small sizes
    python -m fusible bench mlp --preset mixtral --tokens 8192    on a GPU

Times are medians of interleaved rounds in one run; ratios are to the loop over experts. The error is the largest, over
output and gradients, of the relative error against float64 arithmetic on the same rounded inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .contestants import CONTESTANTS, Contestant, race, refusal
from .problem import DTYPES, InaccurateError, Problem, add_run_arguments, add_size_arguments, sizes_of, split_sizes
from .report import Report, describe
from .timing import interleaved, markdown, peak_bytes

YARDSTICK = "dense"  # computes something else: it has no error


class Measured(NamedTuple):
    """What one contestant did."""

    forward: float
    step: float
    peak: int
    error: float | None


def check(problem: Problem, contestants: Mapping[str, Contestant]) -> dict[str, float]:
    """The largest relative error of each contestant.

    Raises:
        InaccurateError: a tensor is more than twice as far from the truth as that of the loop in the same dtype.
    """
    tiny = 8 * torch.finfo(problem.x.dtype).eps
    errors = {name: problem.errors(c.result()) for name, c in contestants.items() if name != YARDSTICK}
    allowed = {name: 2 * error + tiny for name, error in errors.get("loop", {}).items()}
    for name, found in errors.items():
        bad = {tensor: error for tensor, error in found.items() if error > allowed.get(tensor, tiny)}
        if bad:
            raise InaccurateError(f"{name}: relative errors {bad}, allowed {allowed or tiny}")
    return {name: max(found.values()) for name, found in errors.items()}


def measure(problem: Problem, contestants: Mapping[str, Contestant], rounds: int) -> dict[str, Measured]:
    """Checks, then times every contestant."""
    errors, device = check(problem, contestants), problem.x.device
    forward = interleaved({name: c.infer for name, c in contestants.items()}, rounds, device)
    step = interleaved({name: c.step for name, c in contestants.items()}, rounds, device)
    peaks = {name: peak_bytes(c.step, device) for name, c in contestants.items()}
    return {name: Measured(forward[name], step[name], peaks[name], errors.get(name)) for name in contestants}


def table(problem: Problem, measured: Mapping[str, Measured]) -> str:
    """The measurements as Markdown."""
    heading = ("", "forward, ms", "forward + backward, ms", "TFLOP/s", "time / loop", "peak memory, MB", "error")
    base = measured.get("loop")
    rows = []
    for name, m in measured.items():
        ratio = f"{m.step / base.step:.2f}" if base else ""
        speed, error = 3 * problem.flops / m.step / 1e12, "" if m.error is None else f"{m.error:.1e}"
        times = f"{m.forward * 1e3:.3f}", f"{m.step * 1e3:.3f}"
        rows.append((name, *times, f"{speed:.3g}", ratio, f"{m.peak / 1e6:.1f}", error))
    return markdown(heading, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every distribution that is asked for, and prints Markdown."""
    args = _arguments(argv)
    report, (experts, features, hidden, rows) = Report(args.out), sizes_of(args)
    for distribution in args.distribution:
        splits = split_sizes(distribution, experts, rows)
        problem = Problem.make(experts, features, hidden, splits, args.device, DTYPES[args.dtype])
        contestants = race(problem, args.contestants)
        left_out = [f"{n} {why}" for n in args.contestants if (why := refusal(n, problem))]
        print(f"{distribution}: {', '.join(contestants)} …", file=sys.stderr, flush=True)
        measured = measure(problem, contestants, args.rounds)
        notes = [f"\nLeft out: {'; '.join(left_out)}."] if left_out else []
        text = "\n".join([f"### {describe(problem)}, {distribution}\n", table(problem, measured), *notes])
        found = {name: m._asdict() for name, m in measured.items()}
        report.add(text, [{"problem": describe(problem), "distribution": distribution, "contestants": found}])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    description = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(prog="fusible bench mlp", description=description)
    add_size_arguments(parser, tokens=1024)
    add_run_arguments(parser, CONTESTANTS, rounds=30)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
