"""Compares two trees of this project on one device: grouped GEMMs, the grouped MLP, and host time per call.

Each tree runs in its own process, and the two alternate, so that a slow moment of the machine or another clock of the
GPU affects both. Run it with ``python -m fusible.benchmarks.compare BEFORE AFTER``; each is a folder with a built tree,
of any commit whose public names are those of today.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

GEMMS = {"fc1": "NT", "fc2": "NT", "dgrad1": "NN", "dgrad2": "NN", "wgrad1": "TN", "wgrad2": "TN"}
KINDS = (*GEMMS, "forward", "backward", "host forward", "host backward")
_FLUSH_BYTES = 256 * 2**20
_HOST_CALLS = 50


class Case(NamedTuple):
    """A measurement: one of :data:`KINDS` at the sizes of one layer."""

    kind: str
    features: int
    hidden: int
    splits: tuple[int, ...]
    dtype: str


class Row(NamedTuple):
    """The median microseconds of one case in both trees."""

    name: str
    before: float
    after: float


def compare(trees: Sequence[Path], cases: dict[str, Case], rounds: int) -> Iterator[Row]:
    """Measures every case in both trees alternately, after one untimed round."""
    workers = [Worker(tree) for tree in trees]
    try:
        for name, case in cases.items():
            for worker in workers:
                worker.prepare(case)
            times = [[worker.measure() for worker in workers] for _ in range(rounds + 1)][1:]
            yield Row(name, *[median(of_tree) for of_tree in zip(*times, strict=True)])
    finally:
        for worker in workers:
            worker.close()


class Worker:
    """A process that measures with the tree in a folder."""

    def __init__(self, tree: Path) -> None:
        packages = tree / "src" if (tree / "src").is_dir() else tree
        environment = {**os.environ, "PYTHONPATH": str(packages.resolve())}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def prepare(self, case: Case) -> None:
        """Builds the functions that the next measurements call."""
        self._ask(list(case))

    def measure(self) -> float:
        """Microseconds of one measurement."""
        return float(self._ask(None))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the tree's process ended with status {self._process.wait()}")
        return json.loads(answer)


def serve() -> None:
    """Answers the requests of :class:`Worker`: a case is prepared, None is a measurement."""
    measure: Callable[[], float] = float
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not become an answer
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if request is None:
            answer = measure()
        else:
            measure, answer = prepared(Case(*request)), 0.0
        print(json.dumps(answer), file=answers, flush=True)


def prepared(case: Case) -> Callable[[], float]:
    """The function that measures a case in this process."""
    if case.kind in GEMMS:
        return _device_clock(_gemm(case))
    forward, backward = _layer(case)
    if case.kind.endswith("forward"):
        return _host_clock(forward) if case.kind.startswith("host") else _device_clock(forward)
    if case.kind.startswith("host"):
        return _host_clock(backward, before=forward)
    y = forward()
    return _device_clock(lambda: backward(y, retain_graph=True))


def _gemm(case: Case) -> Callable[[], Any]:
    import fusible

    rows, groups = sum(case.splits), len(case.splits)
    features, wide, hidden = case.features, 2 * case.hidden, case.hidden
    sizes = {  # a and b of each product; the layout says which dimension is contracted
        "fc1": ((rows, features), (groups, wide, features)),
        "fc2": ((rows, hidden), (groups, features, hidden)),
        "dgrad1": ((rows, wide), (groups, wide, features)),
        "dgrad2": ((rows, features), (groups, features, hidden)),
        "wgrad1": ((rows, wide), (rows, features)),
        "wgrad2": ((rows, features), (rows, hidden)),
    }[case.kind]
    a, b = [_random(shape, case) for shape in sizes]
    splits = torch.tensor(case.splits, device=_device())
    return lambda: fusible.grouped_gemm(a, b, splits, layout=GEMMS[case.kind])


def _layer(case: Case) -> tuple[Callable[[], Any], Callable[..., Any]]:
    from fusible import GroupedLinear, Scale, Sequential, SwiGLU

    groups, dtype = len(case.splits), getattr(torch, case.dtype)
    form: Any = {"bias": False, "device": _device(), "dtype": dtype, "single_grouped_weight": True}
    fc1 = GroupedLinear(groups, case.features, 2 * case.hidden, **form)
    model = Sequential(fc1, SwiGLU(), Scale(), GroupedLinear(groups, case.hidden, case.features, **form))
    splits, x = torch.tensor(case.splits, device=_device()), _random((sum(case.splits), case.features), case)
    scales = torch.rand(sum(case.splits), device=_device()).requires_grad_()
    leaves, dy = [x.requires_grad_(), scales, *model.parameters()], torch.randn_like(x)

    def backward(y: torch.Tensor, **keywords: bool) -> Any:
        return torch.autograd.grad(y, leaves, dy, **keywords)

    return lambda: model(x, split_sizes=splits, scales=scales), backward


def _random(shape: tuple[int, ...], case: Case) -> torch.Tensor:
    return torch.randn(shape, device=_device(), dtype=getattr(torch, case.dtype)) / 8


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_clock(function: Callable[[], Any]) -> Callable[[], float]:
    """Times a call on the device, in microseconds, after flushing the L2 cache; on a CPU, times the call."""
    if _device() == "cpu":
        return _host_clock(function, calls=1)
    cache = torch.zeros(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def measure() -> float:
        start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        cache.sum()
        start.record()
        function()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end))

    return measure


def _host_clock(
    function: Callable[..., Any], before: Callable[[], Any] | None = None, calls: int = _HOST_CALLS
) -> Callable[[], float]:
    """Times a call on the host, in microseconds, until it returns; ``before`` makes its argument, untimed."""

    def measure() -> float:
        seconds = []
        for _ in range(calls):
            arguments = () if before is None else (before(),)
            if _device() == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            function(*arguments)
            seconds.append(time.perf_counter() - start)
        return 1e6 * median(seconds)

    return measure


def main(argv: Sequence[str]) -> None:
    """Prints a Markdown table: microseconds of each case in both trees, and their ratio."""
    from fusible.benchmarks.problem import PRESETS, split_sizes

    parser = argparse.ArgumentParser(prog="fusible.benchmarks.compare", description=main.__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=[name for name in PRESETS if name != "small"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    cases = {}
    for preset in args.preset:
        sizes = PRESETS[preset]
        rows = args.tokens * sizes.top_k // sizes.ranks
        splits = tuple(split_sizes("random", sizes.experts, rows).tolist())
        for kind in args.kind:
            cases[f"{preset} {kind}"] = Case(kind, sizes.features, sizes.hidden, splits, args.dtype)
    print("| | before, us | after, us | after / before |\n|---|---:|---:|---:|")
    for name, before, after in compare((args.before, args.after), cases, args.rounds):
        print(f"| {name} | {before:.1f} | {after:.1f} | {after / before:.3f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main(sys.argv[1:])
