"""Liger Kernel: a fused MoE layer in Triton that gathers its rows and sums those of a token."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..contestant import Contestant, leaf
from ..problem import Problem
from .peer import Peer
from .routed import require_swiglu

MODULE = "liger_kernel.ops.fused_moe"


def contestant(problem: Problem) -> Contestant:
    """Takes sorted rows as tokens with one expert each; the library routes them all the same."""
    experts = import_module(MODULE).LigerFusedMoEFunction.apply
    rows, device = problem.x.shape[0], problem.x.device
    groups = torch.arange(len(problem.split_sizes), dtype=torch.int32, device=device)
    ids = groups.repeat_interleave(problem.split_sizes, output_size=rows)[:, None]
    x, scales, w1, w2 = map(leaf, (problem.x, problem.scales, problem.w1, problem.w2))

    def forward() -> Tensor:
        y: Tensor = experts(x, w1, w2, ids, scales[:, None])
        return y

    return Contestant(forward, (x, scales, w1, w2), problem.dy)


def experts_forward(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a transformers model; the library routes."""
    require_swiglu(self)
    experts = import_module(MODULE).LigerFusedMoEFunction.apply
    y: Tensor = experts(x, self.gate_up_proj, self.down_proj, top_k_index.int(), top_k_weights)
    return y


PEER = Peer(
    "liger",
    MODULE,
    "a GPU for Triton, `pip install liger-kernel`",
    contestant,
    experts_forward,
    capability=(8, 0),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
)
