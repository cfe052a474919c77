"""All that is to be proved and measured of expert parallelism where there are several GPUs, by one command.

    python tests/support/ep_proof.py --out build/ep_proof

Parts are in the order of their value, correctness before speed, and each has a time limit of its own. What is known is
written as it comes: of cases, one file a rank; of times, what ``fusible bench ep`` writes. With ``--device cpu`` the
same parts run in a small extent, over gloo, or in the kernels' emulation (``--transport symmetric``).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import ep_gpu_cases
import ep_long_cases
import torch
from ep_world import environment, start

LONG = tuple(case.__name__ for case in ep_long_cases.CASES)


class Run(NamedTuple):
    """The common settings of all parts."""

    ranks: int
    device: str
    transport: str
    folder: Path


class Finding(NamedTuple):
    """The outcome of a case or measurement; ``fault`` is empty if nothing was wrong."""

    name: str
    fault: str


def parts_of_cases(run: Run) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """A name, the cases, and the seconds they may take."""
    left_out = ep_gpu_cases.NEED_GPUS if run.device == "cpu" else []
    names = [case.__name__ for case in ep_gpu_cases.CASES if case not in left_out]
    yield "rules", tuple(name for name in names if name not in LONG), 150
    yield "exchanges", LONG[:1], 90
    yield "training", LONG[1:], 90


def of_cases(run: Run, name: str, cases: Sequence[str], seconds: float) -> Iterator[Finding]:
    """Runs them in processes that share nothing with those of other parts. On CPUs only hanging is an error."""
    folder = run.folder / f"{run.ranks} ranks" / name
    folder.mkdir(parents=True)
    limit = seconds if run.device == "cuda" else 900
    module = ep_long_cases if set(cases) <= set(LONG) else ep_gpu_cases
    said = start(module.__name__, run.ranks, folder, limit, run.transport, run.device, cases)
    for case in cases:
        faults = [*said.get(case, [])]
        if len(faults) < run.ranks:
            faults += [f"{len(faults)} of {run.ranks} ranks came to it", *said.get("unfinished", [])]
        yield Finding(case, "\n".join(filter(None, faults)))


def measurements(run: Run) -> Iterator[tuple[str, str, float]]:
    """A name, the arguments of ``fusible bench ep``, and the seconds they may take."""
    if run.device == "cpu":
        yield "times", "--device cpu --preset small --tokens 16 --rounds 1 --transport collective vdev_2d", 300
        return
    models = "--preset qwen3 mixtral gpt-oss deepseek-v3-ep8"
    yield "times", f"{models} --transport symmetric collective vdev_2d", 240
    overlaps = [f"--overlap-dispatch {n}" for n in (0, 8, 16, 32)] + [f"--overlap {n}" for n in (0, 16, 64)]
    off = "--no-overlap-combine --overlap-dispatch 0"
    for overlap in (off, "--overlap-combine", "--overlap-combine --overlap-dispatch 16", *overlaps):
        yield f"times {overlap.replace('--', '')}", f"--preset qwen3 --transport symmetric --no-check {overlap}", 45
    reduced = "--preset qwen3 deepseek-v3-ep8 --transport symmetric --combine reduced --no-check"
    yield "times reduced", reduced, 90
    yield "times skewed", f"{models} --transport symmetric collective --distribution skewed --no-check", 120
    yield "times few tokens", "--preset deepseek-v3-ep8 --tokens 128 --transport symmetric collective", 60


def of_measurement(run: Run, name: str, arguments: str, seconds: float) -> Finding:
    """Prints the tables."""
    out = run.folder / f"{run.ranks} ranks" / name.replace(" ", "-")
    ours = ["--ranks", str(run.ranks), "--out", str(out)]
    command = [sys.executable, "-m", "fusible", "bench", "ep", *arguments.split(), *ours]
    try:
        subprocess.run(command, env=environment(run.device), timeout=seconds, check=True)
    except subprocess.SubprocessError as error:
        return Finding(name, str(error))
    return Finding(name, "")


def findings(run: Run) -> Iterator[Finding]:
    """The findings of all parts."""
    for part in parts_of_cases(run):
        yield from of_cases(run, *part)
    for measurement in measurements(run):
        yield of_measurement(run, *measurement)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all parts for every number of ranks. Ends with 1 where something was wrong."""
    args = _arguments(argv)
    began, failed = time.monotonic(), 0
    for ranks in args.ranks:
        for name, fault in findings(Run(ranks, args.device, args.transport, args.out)):
            print(f"{time.monotonic() - began:6.1f} s  {ranks} ranks  {name}: {fault or 'passed'}", flush=True)
            failed += bool(fault)
    sys.exit(1 if failed else 0)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    several = [n for n in (2, 4, 8) if n <= gpus]
    parser = argparse.ArgumentParser(prog="ep_proof", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=several or [2], help="processes, a GPU each on cuda")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if several else "cpu", help="where it runs")
    parser.add_argument("--transport", choices=("symmetric", "collective"), help="what moves rows in the cases")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where it writes; made anew")
    args = parser.parse_args(argv)
    args.transport = args.transport or ("symmetric" if args.device == "cuda" else "collective")
    return args


if __name__ == "__main__":
    main()
