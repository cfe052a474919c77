"""The host time of the compiler: binding and plan look-up, and whole calls at sizes where the device takes no time.

On CUDA also the time until a call of many experts returns, starting with an idle device: with stacked weights or one
parameter per expert, and gradients in autograd or ``main_grad``. Run it with ``python -m
fusible.benchmarks.host_overhead``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from statistics import median
from typing import Any, NamedTuple

import torch

import fusible
from fusible.fuser.compiler.binding import bind
from fusible.fuser.runtime.autograd import Runtime

from .arguments import positive
from .contestants import experts, fused, loop
from .problem import Problem, split_sizes
from .timing import interleaved, markdown

EXPERTS, FEATURES, HIDDEN, ROWS = 2, 8, 8, 4
MANY_FEATURES, MANY_ROWS = 64, 4


def look_ups(problem: Problem) -> dict[str, Callable[[], None]]:
    """Times binding and plan look-up of a four-op model, for each way to pass the arguments."""
    model, sizes, scales = experts(problem), problem.split_sizes, problem.scales
    fc1, _, scale, fc2 = model
    by_op = {fc1: {"split_sizes": sizes}, scale: {"scales": scales}, fc2: {"split_sizes": sizes}}
    ways: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "shared keywords": ((), None, {"split_sizes": sizes, "scales": scales}),
        "op_kwargs by module": ((), by_op, {}),
        "op_kwargs by index": ((), {0: by_op[fc1], 2: by_op[scale], 3: by_op[fc2]}, {}),
        "positional": ((sizes, scales, sizes), None, {}),
    }

    def look_up(extra: tuple[Any, ...], op_kwargs: Any, shared: dict[str, Any]) -> None:
        compiled, runtime = model._current(), Runtime.of(problem.x)
        compiled.plan(bind(compiled.layout, problem.x, extra, op_kwargs, shared), runtime)

    return {name: partial(look_up, *way) for name, way in ways.items()}


def call_seconds(problem: Problem, rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """Median seconds of a forward without grad, a forward, and a forward with backward: (fused, by hand)."""
    ours, hand = fused(problem), loop(problem)
    seconds = {}
    for name in ("infer", "forward", "step"):
        pair = {"ours": getattr(ours, name), "hand": getattr(hand, name)}
        times = interleaved(pair, rounds, calls=calls)
        seconds[name] = (times["ours"], times["hand"])
    return seconds


def many_experts(groups: int, stacked: bool, main_grad: bool, device: str, dtype: torch.dtype) -> fusible.Sequential:
    """Experts of 64 features. With ``main_grad``, the parameters of a layer are parts of one buffer."""
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype, "single_grouped_weight": stacked}
    options["accumulate_into_main_grad"] = main_grad
    fc1, fc2 = (fusible.GroupedLinear(groups, MANY_FEATURES, n * MANY_FEATURES, **options) for n in (2, 1))
    for layer in (fc1, fc2) if main_grad else ():
        parameters = layer.expert_parameters("weight")
        buffer = torch.zeros((len(parameters), *parameters[0].shape), device=device)
        for parameter, part in zip(parameters, buffer, strict=True):
            parameter.main_grad = part  # type: ignore[attr-defined]
    return fusible.Sequential(fc1, fusible.SwiGLU(), fusible.Scale(), fc2)


class HostSeconds(NamedTuple):
    """Median seconds until a call returns: for the first call after a wait, and for each call of a run.

    A thread that has waited begins with cold caches and a sleeping core; a training step's Python does not.
    """

    first_inference: float
    first_forward: float
    first_backward: float
    inference: float
    forward: float
    backward: float


class CallInputs(NamedTuple):
    """The arguments of a call, and the gradient of its output."""

    x: torch.Tensor
    sizes: torch.Tensor
    scales: torch.Tensor
    dy: torch.Tensor

    @classmethod
    def of(cls, groups: int, tail: int, device: str, dtype: torch.dtype) -> CallInputs:
        rows = MANY_ROWS * groups + tail
        x = torch.randn(rows, MANY_FEATURES, device=device, dtype=dtype)
        sizes, scales = torch.full((groups,), MANY_ROWS, device=device), torch.rand(rows, device=device)
        return cls(x.requires_grad_(), sizes, scales.requires_grad_(), torch.randn_like(x).detach())


def host_seconds(
    model: fusible.Sequential, device: str, dtype: torch.dtype, rounds: int, run: int = 8, step: int = 0
) -> HostSeconds:
    """Times a model; the device is idle before each run, and its work too short to be waited for.

    Args:
        step: the number of rows that each call adds to the call before.
    """
    groups: int = model[0].num_groups  # type: ignore[assignment]
    inputs = [CallInputs.of(groups, i * step, device, dtype) for i in range(run)]
    times: list[tuple[float, ...]] = []

    def call(one: CallInputs) -> torch.Tensor:
        y: torch.Tensor = model(one.x, split_sizes=one.sizes, scales=one.scales)
        return y

    def keep(outputs: list[torch.Tensor], one: CallInputs) -> None:
        outputs.append(call(one))

    for _ in range(rounds + 3):
        with torch.no_grad():
            inferences = _each(call, inputs, device)
        outputs: list[torch.Tensor] = []
        forwards, backwards = _each(partial(keep, outputs), inputs, device), []
        _idle(device)
        for y, one in zip(outputs, inputs, strict=True):
            for tensor in (one.x, one.scales, *model.parameters()):
                tensor.grad = None
            start = time.perf_counter()
            torch.autograd.backward(y, one.dy)
            backwards.append(time.perf_counter() - start)
        runs = inferences, forwards, backwards
        times.append((*[t[0] for t in runs], *[median(t[1:]) for t in runs]))
    return HostSeconds(*map(median, zip(*times[3:], strict=True)))


def _each(function: Callable[[CallInputs], object], inputs: Sequence[CallInputs], device: str) -> list[float]:
    """Seconds of each of a run of calls, the device idle before the first."""
    marks = [_idle(device)]
    for one in inputs:
        function(one)
        marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)]


def _idle(device: str) -> float:
    """The time at which the device has finished all work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def print_many_experts(device: str, dtype: torch.dtype, counts: Sequence[int], rounds: int) -> None:
    """The table of :func:`host_seconds`."""
    rows = []
    for groups, stacked, main_grad, step in product(counts, (True, False), (False, True), (0, 1)):
        if step and (main_grad or not stacked):
            continue
        model = many_experts(groups, stacked, main_grad, device, dtype)
        seconds = host_seconds(model, device, dtype, rounds, step=step)
        weights = "stacked" if stacked else "one an expert"
        grads = "main_grad" if main_grad else "autograd"
        label = f"E={groups}, {weights}, {grads}" + (", other rows in each call" if step else "")
        rows.append((label, *[f"{s * 1e6:.0f}" for s in seconds]))
    heading = f"host time on {device}, µs; K=F={MANY_FEATURES}, {MANY_ROWS} rows an expert"
    columns = "first without grad", "first forward", "first backward", "without grad", "forward", "backward"
    print("\n" + markdown((heading, *columns), rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both as Markdown."""
    parser = argparse.ArgumentParser(prog="host_overhead", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=positive, default=50)
    parser.add_argument("--calls", type=positive, default=100, help="a round")
    args = parser.parse_args(argv)
    sizes = split_sizes("balanced", EXPERTS, ROWS)
    problem = Problem.make(EXPERTS, FEATURES, HIDDEN, sizes, "cpu", torch.float32)
    looked_up = interleaved(look_ups(problem), args.rounds, calls=args.calls)
    print(markdown(("bind + plan look-up", "µs"), [(n, f"{s * 1e6:.1f}") for n, s in looked_up.items()]))
    names = {"infer": "forward, no grad", "forward": "forward", "step": "forward + backward"}
    rows = []
    for name, (ours, hand) in call_seconds(problem, args.rounds, args.calls).items():
        rows.append((names[name], f"{ours * 1e6:.1f}", f"{hand * 1e6:.1f}", f"{ours / hand:.2f}"))
    sizes_text = f"E={EXPERTS}, K={FEATURES}, F={HIDDEN}, T={ROWS}"
    print("\n" + markdown((f"whole call, {sizes_text}", "fused, µs", "by hand, µs", "ratio"), rows))
    if torch.cuda.is_available():
        print_many_experts("cuda", torch.bfloat16, (64, 256), 2 * args.rounds)


if __name__ == "__main__":
    main()
