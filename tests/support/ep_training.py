"""A small language model whose experts are spread over ranks, beside the same model in one process: one loss curve.

What is not an expert is computed by every rank for the tokens of all, so that nothing but the experts and their
exchanges is between the two curves, and they must agree in every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from ep_world import World, part, whole
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from fusible import ep
from fusible.examples.moe_lm import read_text

HIDDEN, BYTES, LAYERS = 64, 256, 2
COUNTS = ((48, 16, 64, 32), (64, 0, 16, 48), (0, 64, 32, 0))
"""Tokens by rank, of one step after the other; a rank that is alone has some in each."""


class Split(NamedTuple):
    """How the tokens of a step are spread over ranks; one rank has all in one process."""

    counts: tuple[int, ...]
    rank: int

    @property
    def mine(self) -> slice:
        return slice(sum(self.counts[: self.rank]), sum(self.counts[: self.rank + 1]))

    def gathered(self, x: Tensor) -> Tensor:
        """The tokens of all ranks, from those of this one."""
        padded = F.pad(x, (0, 0, 0, max(self.counts) - len(x)))
        parts = list(x.new_empty(len(self.counts), *padded.shape))  # the device of a backward's thread is no default
        dist.all_gather(parts, padded)
        return torch.cat([each[:count] for each, count in zip(parts, self.counts, strict=True)])


class TakeMine(torch.autograd.Function):
    """The tokens of this rank; the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return x[split.mine].clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.split.gathered(dx), None


class GatherAll(torch.autograd.Function):
    """The tokens of all ranks; the gradients of those of this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return split.gathered(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx[ctx.split.mine].clone(), None


class SpreadModel(nn.Module):
    """Predicts the next byte from one byte. ``experts`` are layers, of all experts or of this rank's."""

    def __init__(self, experts: Sequence[nn.Module], group: ep.Group) -> None:
        super().__init__()
        s = group.settings
        self.top_k, self.dtype = s.top_k, s.dtype
        torch.manual_seed(7)
        self.embedding, self.head = nn.Parameter(torch.randn(BYTES, HIDDEN) / 4), nn.Linear(HIDDEN, BYTES)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in experts)
        self.routers = nn.ModuleList(nn.Linear(HIDDEN, s.num_experts, bias=False) for _ in experts)
        self.experts = nn.ModuleList(experts)

    def forward(self, text: Tensor, split: Split | None) -> Tensor:
        """The loss of the tokens of all ranks."""
        x = F.one_hot(text[:-1], BYTES).to(self.embedding.dtype) @ self.embedding
        for norm, router, experts in zip(self.norms, self.routers, self.experts, strict=True):
            h = norm(x)
            weights, ids = router(h).softmax(-1).topk(self.top_k)
            moved = h.to(self.dtype), ids, weights
            if split is not None:
                moved = TakeMine.apply(moved[0], split), ids[split.mine], TakeMine.apply(weights, split)
            y = experts(moved[0], top_k_index=moved[1], top_k_weights=moved[2])
            x = x + (y if split is None else GatherAll.apply(y, split)).to(x.dtype)
        return F.cross_entropy(self.head(x), text[1:])


class Curves(NamedTuple):
    """The losses of all steps, [steps], in one process and on all ranks."""

    one_process: Tensor
    ranks: Tensor


def trained_side_by_side(world: World, group: ep.Group, steps: int) -> Curves:
    """Trains both models on the same text."""
    models = [SpreadModel([layer(group) for _ in range(LAYERS)], group) for layer in (whole, part)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    text, losses = read_text(200_000).to(torch.get_default_device()), torch.zeros(2, steps)
    draw, device = torch.Generator().manual_seed(0), torch.get_default_device()
    for step in range(steps):
        counts = COUNTS[step % len(COUNTS)][: world.size]
        split = Split(counts if any(counts) else COUNTS[0][:1], world.rank)
        start = int(torch.randint(len(text) - 200, (), generator=draw, device="cpu"))
        batch = text[start : start + sum(split.counts) + 1].to(device)
        for which, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = model(batch, split if which else None)
            loss.backward()
            optimizer.step()
            losses[which, step] = loss.detach()
    return Curves(*losses)


def assert_same_curve(world: World, group: ep.Group, steps: int) -> None:
    """The curves agree in every bit, and go down."""
    curves = trained_side_by_side(world, group, steps)
    group.check(synchronize=True)
    apart = (curves.ranks - curves.one_process).abs()
    assert torch.equal(*curves), f"apart by {float(apart.max())} from step {int(apart.nonzero()[0])} of {steps} on"
    tenth = max(1, steps // 10)
    assert curves.ranks[-tenth:].mean() < curves.ranks[:tenth].mean() - 0.2, curves.ranks
