"""Times chains that only add and multiply as one program against their ops one by one.

Alone, behind a grouped linear, and between two. ``python -m fusible.benchmarks.chains`` needs a GPU for times that say
anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusible
from fusible import AddExtraInput, Bias, ConstantScale, GroupedLinear, Op, Scale, Sequential

from .timing import interleaved, markdown

_FUSIONS = frozenset({"PointwiseChain", "GroupedLinearChain", "GroupedLinearResidual", "GroupedMLP"})


def models(groups: int, depth: int, columns: int) -> dict[str, list[Op]]:
    """The ops of each chain, with the linears around it."""
    first, second = GroupedLinear(groups, depth, columns), GroupedLinear(groups, columns, depth)
    return {
        "bias, scale": [Bias(columns), Scale()],
        "residual, bias, scale, constant": [AddExtraInput("residual"), Bias(columns), Scale(), ConstantScale(0.5)],
        "linear, constant, scale": [first, ConstantScale(0.5), Scale()],
        "linear, bias, scale, linear": [first, Bias(columns), Scale(), second],
        "linear, residual, scale, linear": [first, AddExtraInput("residual"), Scale(), second],
    }


class ChainCase:
    """A model, its arguments, and a step of it."""

    def __init__(self, ops: list[Op], rows: int, columns: int, groups: int, depth: int, device: torch.device) -> None:
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.model = Sequential(*ops).to(**options)
        self.x = torch.randn(rows, depth if isinstance(ops[0], GroupedLinear) else columns, **options).requires_grad_()
        offered = {
            "split_sizes": torch.full((groups,), rows // groups, device=device),
            "scales": torch.rand(rows, device=device, requires_grad=True),
            "residual": torch.randn(rows, columns, **options).requires_grad_(),
        }
        names = {name for op in ops for name in op.keywords}
        self.keywords = {name: tensor for name, tensor in offered.items() if name in names}
        leaves = [self.x, *self.keywords.values(), *self.model.parameters()]
        self.leaves = [leaf for leaf in leaves if leaf.requires_grad]

    def forward(self, fused: bool) -> Tensor:
        with fusible.config(disable_fusions=frozenset() if fused else _FUSIONS):
            y: Tensor = self.model(self.x, **self.keywords)
        return y

    def step(self, fused: bool) -> Sequence[Tensor]:
        """Runs a step; returns the output and all gradients."""
        y = self.forward(fused)
        return y, *torch.autograd.grad(y, self.leaves, y.detach())


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the microseconds of each chain, op by op and as one program."""
    parser = argparse.ArgumentParser(prog="python -m fusible.benchmarks.chains", description=__doc__)
    sizes = {"rows": 65536, "columns": 1536, "depth": 2048, "groups": 128, "rounds": 20}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device, rows = torch.device(options.device), list[list[str]]()
    for name, ops in models(options.groups, options.depth, options.columns).items():
        case = ChainCase(ops, options.rows, options.columns, options.groups, options.depth, device)
        forward, both = ({"ops": partial(f, False), "fused": partial(f, True)} for f in (case.forward, case.step))
        with torch.no_grad():
            seconds = [interleaved(forward, options.rounds, device)]
        seconds.append(interleaved(both, options.rounds, device))
        times = [1e6 * each[f] for each in seconds for f in ("ops", "fused")]
        rows.append([name, *[f"{time:.0f}" for time in times], f"{times[2] / times[3]:.2f}"])
    heading = ["chain, µs", "forward, ops", "forward, fused", "both, ops", "both, fused", "speed-up"]
    print(markdown(heading, rows))


if __name__ == "__main__":
    main()
