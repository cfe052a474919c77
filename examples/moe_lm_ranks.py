"""The demo on several processes: experts are spread over them, the rest of the model is replicated.

Run it with ``python -m fusible demo --ep 2``. Each process trains on its own batches, on its own GPU if there are GPUs.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from io import StringIO

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from fusible.ep import Group
from fusible.examples.moe_lm import (
    CONTEXT,
    HELD_OUT_BYTES,
    LanguageModel,
    Setting,
    first_layer,
    held_out_loss,
    read_text,
    recent,
    train,
)


class Process:
    """One of the processes that train one model; see :class:`moe_lm.Ranks`."""

    def __init__(self, group: Group, device: str) -> None:
        self.rank, self._size, self._device = group.rank, group.size, device

    def agreed(self, done: Iterator[float]) -> Iterator[float]:
        """The progress of the first process."""
        while (now := float(self._from_first(next(done, 1.0)))) < 1:
            yield now

    def _from_first(self, value: float) -> Tensor:
        number = torch.tensor([value], device=self._device)
        dist.broadcast(number, 0)
        return number

    def clip(self, model: LanguageModel) -> None:
        """Sums and averages gradients, then clips. Experts' gradients already cover the tokens of all processes."""
        of_experts = {id(p) for block in model.blocks for p in block.moe.experts.parameters()}  # type: ignore[union-attr]
        squares = torch.zeros(2, device=self._device)
        for p in model.parameters():
            assert p.grad is not None
            if id(p) not in of_experts:
                dist.all_reduce(p.grad)
            p.grad /= self._size  # each loss is the mean of one batch
            squares[int(id(p) in of_experts)] += p.grad.square().sum()
        dist.all_reduce(squares[1:])
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squares.sum().sqrt())


def start(args: Namespace) -> None:
    """Starts the processes, and waits for them."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (args, folder), nprocs=args.ep)  # type: ignore[no-untyped-call]


def work(rank: int, args: Namespace, folder: str) -> None:
    """The work of one process; the first one prints."""
    cuda = torch.device(args.device).type == "cuda"
    device, gpu = (f"cuda:{rank}", torch.device("cuda", rank)) if cuda else (args.device, None)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // args.ep))
    backend, store = "nccl" if cuda else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=args.ep, device_id=gpu)
    with nullcontext() if rank == 0 else redirect_stdout(StringIO()):
        run(args, device)
    dist.barrier()
    dist.destroy_process_group()


def run(args: Namespace, device: str) -> None:
    """Trains, and prints how the experts of one process run."""
    setting, text = Setting.on(device), read_text()
    size = setting.size
    group = Group(
        num_experts=size.experts,
        max_tokens=max(size.batch, 64) * CONTEXT,
        top_k=size.top_k,
        hidden=size.features,
        dtype=setting.dtype,
        capacity="exact",
    )
    torch.manual_seed(0)
    model = setting.model(group)
    for parameter in model.parameters():  # all start from the first one's; its random experts serve as well as others
        dist.broadcast(parameter.data, 0)
    print(f"{group.size} processes, each with {group.num_local_experts} of {size.experts} experts")
    with setting.autocast():
        losses = train(
            model, text[:-HELD_OUT_BYTES], args.seconds, args.steps, size.batch, size.rate,
            ranks=Process(group, device),
        )  # fmt: skip
        print(f"loss {losses[0]:.3f} to {recent(losses):.3f} in {len(losses)} steps")
        print(f"held-out loss: {held_out_loss(model, text[-HELD_OUT_BYTES:]):.3f} nats a byte\n")
    print(first_layer(model).experts.explain())
    print(f"\n{group.statistics()}")
