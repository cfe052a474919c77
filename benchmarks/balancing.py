"""How even each way of balancing makes the load of experts: 300 steps of the demo's small model on a CPU.

Run it with ``python -m fusible.benchmarks.balancing --plot docs/plots/balancing.svg``. The load of a step is that of
its most loaded expert, divided by the mean of all; 1 is even. With k of E experts it is at most E / k.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusible
from fusible.benchmarks.arguments import add_plot_argument, command, positive
from fusible.benchmarks.plots import curves
from fusible.benchmarks.timing import markdown
from fusible.examples.moe_lm import (
    CONTEXT,
    HELD_OUT_BYTES,
    LanguageModel,
    batch_of,
    clip,
    cross_entropy,
    held_out_loss,
    read_text,
)

FEATURES, HIDDEN, EXPERTS, TOP_K, BATCH, RATE = 64, 64, 32, 4, 8, 3e-3
WINDOW = 20  # steps, over which a load is averaged

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "SwitchLoss(0.01)": {"losses": (fusible.SwitchLoss(0.01),)},
    "SequenceLoss(0.01)": {"losses": (fusible.SequenceLoss(0.01),)},
    "SignBias(0.001)": {"scores": "sigmoid", "balance": fusible.SignBias(1e-3)},
    "SignBias(0.01)": {"scores": "sigmoid", "balance": fusible.SignBias(1e-2)},
    "QuantileBias()": {"scores": "sigmoid", "balance": fusible.QuantileBias()},
}


class LoadCurve(NamedTuple):
    """The loads of a training, and its loss at the end.

    Attributes:
        loads: of each step, the mean over the layers of the highest load divided by the mean one.
        held_out_loss: in nats a byte.
    """

    loads: list[float]
    held_out_loss: float

    def around(self, step: int) -> float:
        """The mean load of the steps up to this one."""
        last = self.loads[max(0, step - WINDOW) : step]
        return sum(last) / len(last)


class BalancedExperts(nn.Module):
    """:class:`fusible.MoE` in the form that the demo's model calls.

    Attributes:
        counts: int64 [E], of the last call.
    """

    counts: Tensor

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.moe = fusible.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, loss, self.counts = self.moe(x, sequences=CONTEXT)
        return y, x.new_zeros(()) if loss is None else loss


def train(options: Mapping[str, Any], steps: int) -> LoadCurve:
    """Trains the demo's model with these arguments of :class:`fusible.MoE`."""
    torch.manual_seed(0)
    model, text = LanguageModel(FEATURES, 4, HIDDEN, EXPERTS, TOP_K), read_text()
    layers = [BalancedExperts(options) for _ in model.blocks]
    for block, layer in zip(model.blocks, layers, strict=True):
        block.moe = layer
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    generator, loads = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x, target = batch_of(text[:-HELD_OUT_BYTES], BATCH, generator)
        logits, balance = model(x)
        optimizer.zero_grad()
        (cross_entropy(logits, target) + len(layers) * balance).backward()
        clip(model)
        optimizer.step()
        fusible.update_biases(model)
        counts = torch.stack([layer.counts for layer in layers])
        loads.append(float((counts.amax(-1) * EXPERTS / counts.sum(-1)).mean()))
    return LoadCurve(loads, held_out_loss(model.eval(), text[-HELD_OUT_BYTES:]))


def table(trainings: Mapping[str, LoadCurve], steps: int) -> str:
    """The trainings as a Markdown table."""
    shown = [max(1, round(steps * part)) for part in (0.1, 0.25, 0.5, 1)]
    heading = ("balance", *[f"load, step {step}" for step in shown], "held-out loss")
    rows = []
    for name, training in trainings.items():
        loads = [f"{training.around(step):.2f}" for step in shown]
        rows.append((f"`{name}`", *loads, f"{training.held_out_loss:.3f}"))
    return markdown(heading, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with each method, and prints their loads."""
    parser = command("fusible.benchmarks.balancing", __doc__)
    parser.add_argument("--steps", type=positive, default=300, help="of each training")
    add_plot_argument(parser)
    args = parser.parse_args(argv)
    trainings = {name: train(options, args.steps) for name, options in METHODS.items()}
    if args.plot:
        loads = {name: [each.around(step) for step in range(1, args.steps + 1)] for name, each in trainings.items()}
        title = f"{EXPERTS} experts, {TOP_K} of them for each token: the load of the most loaded one; 1 is even"
        curves(args.plot, loads, title, "step", f"load / mean load, mean of {WINDOW} steps")
    if args.json:
        print(json.dumps({name: training._asdict() for name, training in trainings.items()}, indent=1))
    else:
        print(table(trainings, args.steps))


if __name__ == "__main__":
    main()
