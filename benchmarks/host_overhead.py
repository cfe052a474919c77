"""What the compiler costs on the host: binding and plan look-up, and whole calls at sizes where nothing else counts.

Run it with ``python -m fusible.benchmarks.host_overhead``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from fusible.fuser.autograd import Runtime
from fusible.fuser.binding import bind

from .contestants import experts, fused, loop
from .problem import Problem, split_sizes
from .timing import interleaved, markdown

EXPERTS, FEATURES, HIDDEN, ROWS = 2, 8, 8, 4


def look_up_seconds(problem: Problem, rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of bind and plan look-up of a four-op model, for each way to give the arguments."""
    model, sizes, scales = experts(problem), problem.split_sizes, problem.scales
    fc1, _, scale, fc2 = model
    by_op = {fc1: {"split_sizes": sizes}, scale: {"scales": scales}, fc2: {"split_sizes": sizes}}
    ways = {
        "shared keywords": ((), None, {"split_sizes": sizes, "scales": scales}),
        "op_kwargs by module": ((), by_op, {}),
        "op_kwargs by index": ((), {0: by_op[fc1], 2: by_op[scale], 3: by_op[fc2]}, {}),
        "positional": ((sizes, scales, sizes), None, {}),
    }

    def look_up(extra: tuple[object, ...], op_kwargs: object, shared: dict[str, object]) -> None:
        layout, runtime = model._layout(), Runtime.of(problem.x)
        model._plan(layout, bind(layout, problem.x, extra, op_kwargs, shared), runtime)  # type: ignore[arg-type]

    functions = {name: (lambda way=way: look_up(*way)) for name, way in ways.items()}
    return interleaved(functions, rounds, calls=calls)


def call_seconds(problem: Problem, rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """Median seconds of a forward without grad, a forward, and a forward with backward: (fused, by hand)."""
    ours, hand = fused(problem), loop(problem)
    seconds = {}
    for name in ("infer", "forward", "step"):
        pair = {"ours": getattr(ours, name), "hand": getattr(hand, name)}
        found = interleaved(pair, rounds, calls=calls)
        seconds[name] = (found["ours"], found["hand"])
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both as Markdown."""
    parser = argparse.ArgumentParser(prog="host_overhead", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--calls", type=int, default=100, help="a round")
    args = parser.parse_args(argv)
    sizes = split_sizes("balanced", EXPERTS, ROWS)
    problem = Problem.make(EXPERTS, FEATURES, HIDDEN, sizes, "cpu", torch.float32)
    looked_up = look_up_seconds(problem, args.rounds, args.calls)
    print(markdown(("bind + plan look-up", "µs"), [(n, f"{s * 1e6:.1f}") for n, s in looked_up.items()]))
    names = {"infer": "forward, no grad", "forward": "forward", "step": "forward + backward"}
    rows = []
    for name, (ours, hand) in call_seconds(problem, args.rounds, args.calls).items():
        rows.append((names[name], f"{ours * 1e6:.1f}", f"{hand * 1e6:.1f}", f"{ours / hand:.2f}"))
    sizes_text = f"E={EXPERTS}, K={FEATURES}, F={HIDDEN}, T={ROWS}"
    print("\n" + markdown((f"whole call, {sizes_text}", "fused, µs", "by hand, µs", "ratio"), rows))


if __name__ == "__main__":
    main()
