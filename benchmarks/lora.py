"""Adapters on experts: time and peak memory of a step, compared with frozen experts and with PEFT's summed weights.

    python -m fusible.benchmarks.lora --tokens 8192

``frozen`` trains nothing of the experts: their input wants a gradient. ``LoRA`` trains adapters. ``summed`` is the same
adapters as PEFT has them by itself: ``weight + B A`` as a tensor, and ``grouped_mm``. ``full`` trains the weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fusible
from fusible import GroupedLinear, GroupedLoRA
from fusible.ops.kernels.doors import low_rank

from .arguments import positive
from .problem import PRESETS, Preset
from .timing import interleaved, markdown, peak_bytes

Step = Callable[[], object]


def linears(preset: Preset, rank: int, device: str) -> tuple[GroupedLinear | GroupedLoRA, GroupedLinear | GroupedLoRA]:
    """Up and down, with adapters of this rank, or without for 0."""
    shapes = (preset.features, 2 * preset.hidden), (preset.hidden, preset.features)
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    if rank:
        up, down = (GroupedLoRA(preset.experts, *shape, rank, **options) for shape in shapes)
        return up, down
    first, second = (GroupedLinear(preset.experts, *shape, **options) for shape in shapes)
    return first, second


def layer(
    preset: Preset, up: GroupedLinear | GroupedLoRA, down: GroupedLinear | GroupedLoRA, trained: str
) -> fusible.Sequential:
    """Routed experts; only parameters with ``trained`` in their name require gradients."""
    model = fusible.Sequential(
        fusible.Dispatch(preset.experts), up, fusible.SwiGLU(), down, fusible.Scale(), fusible.Combine()
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


def contestants(preset: Preset, tokens: int, rank: int, device: str) -> dict[str, Step]:
    """A step of each kind of training, on the same routing."""
    x = torch.randn(tokens, preset.features, device=device, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(tokens, preset.experts, device=device).topk(preset.top_k, -1)
    index, weights, dy = scores.indices, scores.values.softmax(-1), torch.randn_like(x)

    def step_of(model: fusible.Sequential) -> Step:
        leaves = [x, *[p for p in model.parameters() if p.requires_grad]]

        def step() -> object:
            return torch.autograd.grad(model(x, top_k_index=index, top_k_weights=weights), leaves, dy)

        return step

    adapted = linears(preset, rank, device)
    steps = {
        "frozen": step_of(layer(preset, *linears(preset, 0, device), "none")),
        "LoRA": step_of(layer(preset, *adapted, "lora")),
        "full": step_of(layer(preset, *linears(preset, 0, device), "weight")),
    }
    if device == "cuda":
        up, down = (dict(fc.named_parameters()) for fc in adapted)
        steps["summed"] = _summed(up, down, x, index, weights, dy, preset)
    return steps


def _summed(
    up: Mapping[str, Tensor],
    down: Mapping[str, Tensor],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    dy: Tensor,
    preset: Preset,
) -> Step:
    leaves = [linear[name] for linear in (up, down) for name in ("lora_a", "lora_b")]

    def step() -> object:
        order = index.flatten().sort(stable=True)
        ends = torch.bincount(index.flatten(), minlength=preset.experts).cumsum(0).to(torch.int32)
        rows = x[order.indices // preset.top_k]
        gate, value = F.grouped_mm(rows, _sum(up).mT, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * value, _sum(down).mT, offs=ends)
        y = y * weights.flatten()[order.indices].unsqueeze(-1).to(y.dtype)
        out = torch.zeros_like(x).index_add(0, order.indices // preset.top_k, y)
        return torch.autograd.grad(out, [x, *leaves], dy)

    return step


def _sum(linear: Mapping[str, Tensor]) -> Tensor:
    return linear["weight"] + linear["lora_b"] @ linear["lora_a"]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3")
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--passes", nargs="*", help="kinds of passes that one kernel makes, all by 'all'")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.passes is not None:
        low_rank.PASSES = low_rank.ALL_PASSES if args.passes == ["all"] else frozenset(args.passes)
    steps = contestants(PRESETS[args.preset], args.tokens, args.rank, device)
    seconds = interleaved(steps, args.rounds, device, steady=device == "cuda")
    rows = [
        [
            name,
            f"{seconds[name] * 1e3:.2f}",
            f"{seconds[name] / seconds['frozen']:.2f}",
            f"{peak_bytes(step, device) >> 20}",
        ]
        for name, step in steps.items()
    ]
    heading = f"{args.preset}, {args.tokens} tokens, rank {args.rank}, bf16, {device}"
    print(markdown([heading, "step, ms", "/ frozen", "peak, MB"], rows))


if __name__ == "__main__":
    main()
