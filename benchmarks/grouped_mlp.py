"""The experts of a layer: fused plan, unfused plan, and what people write by hand. Accuracy first, then speed.

    python -m fusible bench                                   on this machine, small sizes
    python -m fusible bench --preset mixtral --tokens 8192    on a GPU

Times are medians of interleaved rounds in one run; ratios are to the loop over experts. The error is the largest, over
output and gradients, of the relative error against float64 arithmetic on the same rounded inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .contestants import CONTESTANTS, Contestant, race, refusal
from .problem import DISTRIBUTIONS, Problem, add_size_arguments, sizes_of, split_sizes
from .timing import interleaved, markdown, peak_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
YARDSTICK = "dense"  # computes something else: it has no error


class Measured(NamedTuple):
    """What one contestant did."""

    forward: float
    step: float
    peak: int
    error: float | None


class InaccurateError(Exception):
    """A contestant's result is wrong: its speed is of no interest."""


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


def describe(problem: Problem) -> str:
    """The problem in one line."""
    groups, columns, features = problem.w1.shape
    sizes = f"E={groups}, K={features}, F={columns // 2}, T={problem.x.shape[0]}"
    where = torch.cuda.get_device_name() if problem.x.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    return f"{sizes}, {str(problem.x.dtype).removeprefix('torch.')}, {where}, torch {torch.__version__}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every distribution that is asked for, and prints Markdown."""
    args = _arguments(argv)
    parts = []
    experts, features, hidden, rows = sizes_of(args)
    for distribution in args.distribution:
        splits = split_sizes(distribution, experts, rows)
        problem = Problem.make(experts, features, hidden, splits, args.device, DTYPES[args.dtype])
        contestants = race(problem, args.contestants)
        left_out = [f"{n} {why}" for n in args.contestants if (why := refusal(n, problem))]
        print(f"{distribution}: {', '.join(contestants)} …", file=sys.stderr, flush=True)
        text = table(problem, measure(problem, contestants, args.rounds))
        notes = [f"\nLeft out: {'; '.join(left_out)}."] if left_out else []
        parts.append("\n".join([f"### {describe(problem)}, {distribution}\n", text, *notes]))
        print(parts[-1] + "\n", flush=True)
    if args.out:
        args.out.write_text("\n\n".join(parts) + "\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="fusible bench", description=__doc__.splitlines()[0] if __doc__ else None)
    add_size_arguments(parser, tokens=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, nargs="+", default=["random"])
    parser.add_argument("--contestants", choices=CONTESTANTS, nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the Markdown there as well")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
