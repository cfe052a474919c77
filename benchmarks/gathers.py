"""The time of a step whose weights FSDP2 gathers: in 16 bits, in 16 bits and then quantised, and in e4m3.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m fusible.benchmarks.gathers --preset qwen3

Layers of a model's experts, each sharded over all ranks, forward and backward. Times are those of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fusible import Float8Block, GroupedLinear, Sequential, SwiGLU, gather_quantized
from fusible.ops.formats.recipe import Recipe

from .arguments import positive, require_cuda
from .problem import PRESETS, Preset, split_sizes
from .timing import markdown


class Layers(nn.Module):
    """Experts one after the other, each with a residual connection."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, split_sizes=sizes)
        return x


def experts(preset: Preset, device: torch.device, recipe: Recipe | None = None) -> Sequential:
    """The experts of a layer, in bfloat16."""
    linear = partial(GroupedLinear, preset.experts, device=device, dtype=torch.bfloat16, recipe=recipe)
    return Sequential(linear(preset.features, 2 * preset.hidden), SwiGLU(), linear(preset.hidden, preset.features))


WAYS: Mapping[str, Callable[[Preset, torch.device], nn.Module]] = {
    "16 bits, products in 16 bits": experts,
    "16 bits, Float8Block": partial(experts, recipe=Float8Block()),
    "e4m3, Float8Block": lambda preset, device: gather_quantized(experts(preset, device, Float8Block())),
}


def sharded(build: Callable[[], nn.Module], layers: int, mesh: DeviceMesh) -> Layers:
    """Builds ``layers`` layers, each gathered on its own."""
    torch.manual_seed(0)
    model = Layers([build() for _ in range(layers)])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def milliseconds(model: Layers, x: Tensor, sizes: Tensor, steps: int) -> tuple[float, float]:
    """Medians of a forward and of a backward, on the slowest rank."""
    times: list[list[float]] = [[], []]
    for _ in range(steps + 2):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        dist.barrier()
        marks[0].record()
        y = model(x, sizes)
        marks[1].record()
        y.backward(x)
        marks[2].record()
        torch.cuda.synchronize()
        for part, (begin, end) in zip(times, (marks[:2], marks[1:]), strict=True):
            part.append(begin.elapsed_time(end))
    slowest = torch.tensor([median(part[2:]) for part in times], device=x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest[0].item(), slowest[1].item()


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3")
    parser.add_argument("--tokens", type=positive, default=8192, help="of a rank")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=10)
    args = parser.parse_args(argv)
    require_cuda(parser)
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    preset, mesh = PRESETS[args.preset], init_device_mesh("cuda", (dist.get_world_size(),))
    rows = args.tokens * preset.top_k // preset.ranks
    x = torch.randn(rows, preset.features, device=device, dtype=torch.bfloat16, requires_grad=True)
    sizes = split_sizes("random", preset.experts, rows).to(device)
    lines = []
    for name, build in WAYS.items():
        model = sharded(partial(build, preset, device), args.layers, mesh)
        forward, backward = milliseconds(model, x, sizes, args.steps)
        lines.append([name, f"{forward:.2f}", f"{backward:.2f}", f"{forward + backward:.2f}"])
    if dist.get_rank() == 0:
        print(markdown(["gathered in", "forward, ms", "backward, ms", "step, ms"], lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
