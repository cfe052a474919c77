"""Experts sharded over two processes by FSDP2, compared with the same training in one process.

    python examples/fsdp.py          two GPUs with NCCL where there are two, else two processes on the CPU with gloo

Each process has half of the batch and, between uses, half of the experts. The losses equal those of one process.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn

import fusible

EXPERTS, FEATURES, HIDDEN, TOP_K, STEPS, BATCH = 8, 64, 96, 2, 20, 128


class Layer(nn.Module):
    """A residual mixture-of-experts layer: router, experts, weighted sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(FEATURES), nn.Linear(FEATURES, EXPERTS, bias=False)
        fc1, fc2 = (
            fusible.GroupedLinear(EXPERTS, FEATURES, 2 * HIDDEN),
            fusible.GroupedLinear(EXPERTS, HIDDEN, FEATURES),
        )
        self.experts = fusible.Sequential(
            fusible.Dispatch(EXPERTS), fc1, fusible.SwiGLU(), fusible.Scale(), fc2, fusible.Combine()
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        weights, index = self.router(rows).float().softmax(-1).topk(TOP_K, -1)  # float32 all the way to the kernel
        y: Tensor = self.experts(rows, top_k_index=index, top_k_weights=weights)
        return x + y


class Losses(NamedTuple):
    """The losses of every step, in one process and sharded, and the dtype in which the experts' weights were
    multiplied.
    """

    alone: list[float]
    sharded: list[float]


def train(model: nn.Module, rank: int, world: int, device: torch.device) -> list[float]:
    """Trains the model; returns the losses of every step, over the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator, losses = torch.Generator().manual_seed(1), []
    teacher = torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5
    for _ in range(STEPS):
        x = torch.randn(BATCH, FEATURES, generator=generator)
        part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        target = torch.tanh(x @ teacher)[part].to(device)
        loss = nn.functional.mse_loss(model(x[part].to(device)).float(), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach() / world
        if world > 1:
            dist.all_reduce(whole)
        losses.append(float(whole))
    return losses


def build(device: torch.device) -> nn.Module:
    """Builds the model with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).to(device)


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shards the experts by themselves, then the rest, so that little is gathered at once."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    # the layer prepares the experts' inputs; casting them here would round the scales
    of_experts = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    for layer in model.children():
        fully_shard(layer.experts, mesh=mesh, mp_policy=of_experts)  # type: ignore[arg-type]
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def work(rank: int, world: int, port: int, cuda: bool) -> None:
    """The work of one process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    mesh = init_device_mesh(device.type, (world,))
    alone = train(build(device), 0, 1, device)
    for dtype, allowed in ((None, 1e-4), (torch.bfloat16, 3e-2)):
        model = build(device)
        shard(model, mesh, dtype)
        losses = Losses(alone, train(model, rank, world, device))
        if rank == 0:
            report(model, losses, dtype, allowed)
    dist.barrier()  # a process that ends while the threads of gloo still drop tensors may abort
    dist.destroy_process_group()


def report(model: nn.Module, losses: Losses, dtype: torch.dtype | None, allowed: float) -> None:
    """Prints a line, and fails if the losses differ from those of one process."""
    off = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    local = model[0].experts[1].weight.to_local()  # type: ignore[index]
    kind = str(dtype or torch.float32).removeprefix("torch.")
    print(
        f"{kind}: {len(local)} of {EXPERTS} experts here, loss {losses.sharded[0]:.4f} to {losses.sharded[-1]:.4f}, "
        f"differs from one process by at most {off:.1e}",
        flush=True,
    )
    if off > allowed or losses.sharded[-1] > 0.7 * losses.sharded[0]:
        raise SystemExit(f"{kind}: the losses differ by {off:.1e}, allowed {allowed}; or they do not fall")
    print(fusible.explain(model), flush=True)


def main() -> None:
    """Starts the processes."""
    cuda, world = torch.cuda.device_count() >= 2, 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(work, (world, port, cuda), nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
