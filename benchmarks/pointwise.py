"""Times a pointwise function of a user's against torch.compile and PyTorch op by op.

A clamped SwiGLU times a number for each row. Run it with ``python -m fusible.benchmarks.pointwise``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

import fusible

from .arguments import positive
from .timing import interleaved, markdown

Function = Callable[[], object]


def function(gate: Tensor, up: Tensor, limit: float, s: Tensor) -> Tensor:
    """The function that is timed."""
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * s


def contestants(device: str) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
    """The ways to compute the same function of x and of numbers for its rows, by name."""

    def eager(x: Tensor, s: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        return function(gate, up, 7.0, s.unsqueeze(-1)).to(x.dtype)

    op = fusible.Pointwise(function, halves="concat", constants={"limit": 7.0})
    compiled = {"torch.compile": torch.compile(eager, fullgraph=True)} if device == "cuda" else {}
    return {"Pointwise": lambda x, s: op(x, s=s), "PyTorch": eager, **compiled}


def seconds(rows: int, columns: int, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each contestant: forward, forward without gradients, backward; each of ten calls in a row."""
    x = torch.randn(rows, 2 * columns, device=device, dtype=torch.bfloat16, requires_grad=True)
    s, dy = torch.rand(rows, device=device, requires_grad=True), torch.randn_like(x[:, :columns])
    every = contestants(device)

    def infer(call: Callable[[Tensor, Tensor], Tensor]) -> None:
        with torch.no_grad():
            call(x, s)

    def backward(y: Tensor) -> None:
        torch.autograd.grad(y, [x, s], dy, retain_graph=True)

    for call in every.values():
        for _ in range(3):
            backward(call(x, s))
    kinds: dict[str, dict[str, Function]] = {
        "without gradients": {name: partial(infer, call) for name, call in every.items()},
        "forward": {name: partial(call, x, s) for name, call in every.items()},
        "backward": {name: partial(backward, call(x, s)) for name, call in every.items()},
    }
    return {kind: interleaved(functions, rounds, device, calls=10) for kind, functions in kinds.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(prog="pointwise", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=positive, default=65536)
    parser.add_argument("--columns", type=positive, default=768)
    parser.add_argument("--rounds", type=positive, default=30)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    times = seconds(args.rows, args.columns, device, args.rounds)
    names = list(times["forward"])
    rows = [[name, *[f"{times[kind][name] * 1e6:.0f}" for kind in times]] for name in names]
    heading = f"{args.rows} rows of 2 x {args.columns}, bf16, {device}, µs"
    print(markdown((heading, *times), rows))


if __name__ == "__main__":
    main()
