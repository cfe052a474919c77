"""Times experts whose activation is a function of a user's against the built-in one.

Without numbers of columns and with one for each expert and hidden column, trained and frozen; inside the grouped GEMM
and as a kernel of its own. Run it with ``python -m fusible.benchmarks.functions``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible

from .arguments import positive
from .problem import split_sizes
from .timing import interleaved, markdown

_FUSIONS = frozenset({"GroupedMLP", "GroupedLinearGLU"})


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """A function without numbers of columns."""
    return F.silu(gate) * up


def sloped(gate: Tensor, up: Tensor, beta: Tensor) -> Tensor:
    """The same with a slope inside, which each expert learns for each column."""
    return gate * torch.sigmoid(gate * beta) * up


class Contestant(NamedTuple):
    """Experts with some activation, and whether they may be fused."""

    model: fusible.Sequential
    fused: bool = True

    def step(self, x: Tensor, sizes: Tensor, dy: Tensor) -> None:
        """Forward and backward."""
        inputs = [x, *[parameter for parameter in self.model.parameters() if parameter.requires_grad]]
        with nullcontext() if self.fused else fusible.config(disable_fusions=_FUSIONS):
            torch.autograd.grad(self.model(x, split_sizes=sizes), inputs, dy)

    def infer(self, x: Tensor, sizes: Tensor) -> None:
        """Forward without gradients."""
        with torch.no_grad(), nullcontext() if self.fused else fusible.config(disable_fusions=_FUSIONS):
            self.model(x, split_sizes=sizes)


def contestants(experts: int, features: int, hidden: int, device: str) -> Mapping[str, Contestant]:
    """By name."""

    def mlp(act: nn.Module) -> fusible.Sequential:
        linears = [
            fusible.GroupedLinear(experts, *shape, bias=False, device=device, dtype=torch.bfloat16)
            for shape in ((features, 2 * hidden), (hidden, features))
        ]
        return fusible.Sequential(linears[0], act, linears[1])

    def column(dtype: torch.dtype) -> fusible.Pointwise:
        start = {"beta": torch.ones(experts, hidden, device=device, dtype=dtype)}
        return fusible.Pointwise(sloped, halves="concat", columns=start)

    return {
        "SwiGLU": Contestant(mlp(fusible.SwiGLU())),
        "function": Contestant(mlp(fusible.Pointwise(swiglu, halves="concat"))),
        "column bf16": Contestant(mlp(column(torch.bfloat16))),
        "column fp32": Contestant(mlp(column(torch.float32))),
        "column frozen": Contestant(mlp(column(torch.float32).requires_grad_(False))),
        "column unfused": Contestant(mlp(column(torch.bfloat16)), fused=False),
    }


def seconds(
    experts: int, features: int, hidden: int, rows: int, device: str, rounds: int
) -> Mapping[str, Mapping[str, float]]:
    """Median seconds of each contestant, both directions and the forward alone."""
    every = contestants(experts, features, hidden, device)
    sizes = split_sizes("random", experts, rows).to(device)
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    both: dict[str, Callable[[], None]] = {name: partial(each.step, x, sizes, dy) for name, each in every.items()}
    forward: dict[str, Callable[[], None]] = {name: partial(each.infer, x, sizes) for name, each in every.items()}
    for function in (*both.values(), *forward.values()):  # compiled, and captured for replays
        for _ in range(3):
            function()
    return {
        "forward and backward": interleaved(both, rounds, device, steady=True),
        "forward": interleaved(forward, rounds, device, steady=True),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(prog="functions", description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("experts", 128), ("features", 2048), ("hidden", 768), ("rows", 32768), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    times = seconds(args.experts, args.features, args.hidden, args.rows, device, args.rounds)
    rows = [[name, *[f"{times[kind][name] * 1e3:.3f}" for kind in times]] for name in times["forward"]]
    shape = f"{args.experts} experts of {args.features} x {args.hidden}, {args.rows} rows"
    print(markdown((f"{shape}, bf16, {device}, ms", *times), rows))


if __name__ == "__main__":
    main()
