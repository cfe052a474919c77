"""SonicMoE (``sonic-moe``): a whole routed layer, with QuACK's GEMMs and its own routing kernels."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..contestant import Contestant, InterleavedContestant, interleaved, leaf
from ..problem import Problem
from .peer import Peer
from .routed import require_swiglu


def layer(
    x: Tensor, scores: Tensor, tokens: Tensor, experts: Tensor, w1: Tensor, w2: Tensor, concatenated: bool
) -> Tensor:
    """The weighted sums of the experts' rows, for each token.

    Args:
        x: [T, H].
        scores: float32 [R], the weight of each row.
        tokens: int32 [R], ascending: the token of each row.
        experts: int32 [R], the expert of each row.
        w1: [E, 2F, H].
        w2: [E, H, F].
        concatenated: the rows of the gate stand first in W1, instead of by turns.
    """
    activation = import_module("sonicmoe.enums").ActivationType.SWIGLU
    output, _ = import_module("sonicmoe.functional").moe_general_routing_inputs(
        x,
        scores,
        tokens,
        experts,
        w1.permute(1, 2, 0),
        None,
        w2.permute(1, 2, 0),
        None,
        E=w1.shape[0],
        stream_id=0,  # not read
        activation_type=activation,
        is_inference_mode_enabled=not torch.is_grad_enabled(),
        concat_layout=concatenated,
    )
    y: Tensor = output
    return y


def contestant(problem: Problem) -> Contestant:
    """SonicMoE as a contestant. Each row counts as a token with one expert; routing them is part of the time."""
    groups, rows = len(problem.split_sizes), problem.x.shape[0]
    tokens = torch.arange(rows, dtype=torch.int32, device=problem.x.device)
    ids = torch.arange(groups, dtype=torch.int32, device=problem.x.device)
    experts = ids.repeat_interleave(problem.split_sizes, output_size=rows)
    x, scales, w1, w2 = map(leaf, (problem.x, problem.scales, interleaved(problem.w1), problem.w2))

    def forward() -> Tensor:
        return layer(x, scales, tokens, experts, w1, w2, concatenated=False)

    return InterleavedContestant(forward, (x, scales, w1, w2), problem.dy)


def experts_forward(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a transformers model."""
    require_swiglu(self)
    count, slots = top_k_index.shape
    tokens = torch.arange(count, dtype=torch.int32, device=x.device).repeat_interleave(slots)
    experts, scores = top_k_index.reshape(-1).int(), top_k_weights.reshape(-1).float()
    return layer(x, scores, tokens, experts, self.gate_up_proj, self.down_proj, concatenated=True)


PEER = Peer(
    "sonicmoe",
    "sonicmoe",
    "Hopper or Blackwell, bfloat16, `pip install sonic-moe`; tunes itself for minutes at its first calls",
    contestant,
    experts_forward,
)
