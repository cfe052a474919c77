"""ScatterMoE: grouped GEMMs in Triton that gather their rows and scatter their results."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..contestant import Contestant, leaf, swiglu
from ..problem import Problem
from .peer import Peer


def contestant(problem: Problem) -> Contestant:
    """Takes and returns sorted rows, with the activation op by op, as in the library's own MLP."""
    linear = import_module("scattermoe").parallel_linear
    rows, device = problem.x.shape[0], problem.x.device
    groups = torch.arange(len(problem.split_sizes), device=device)
    order = {
        "k": 1,
        "sorted_expert_idxs": groups.repeat_interleave(problem.split_sizes, output_size=rows),
        "sorted_scattered_idxs": torch.arange(rows, device=device),
        "expert_offsets": problem.split_sizes.cumsum(0),
        "grouped_in": True,
        "grouped_out": True,
    }
    x, scales, w1, w2 = map(leaf, (problem.x, problem.scales, problem.w1, problem.w2))

    def forward() -> Tensor:
        hidden = swiglu(linear(x, w1.permute(0, 2, 1), **order), scales)
        y: Tensor = linear(hidden, w2.permute(0, 2, 1), **order)
        return y

    return Contestant(forward, (x, scales, w1, w2), problem.dy)


def experts_forward(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a transformers model, with any activation; the library routes."""
    package = import_module("scattermoe")
    ids, slots, ends = package.flatten_sort_count(top_k_index, num_experts=self.num_experts)
    w1, w2 = (w if self.is_transposed else w.permute(0, 2, 1) for w in (self.gate_up_proj, self.down_proj))
    b1, b2 = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
    pre = package.parallel_linear(x, w1, top_k_index.shape[1], ids, slots, ends, expert_biases=b1, grouped_out=True)
    gates = top_k_weights.to(x.dtype)
    y: Tensor = package.parallel_linear(
        self._apply_gate(pre), w2, 1, ids, slots, ends, expert_biases=b2, gates=gates, grouped_in=True
    )
    return y


PEER = Peer(
    "scattermoe",
    "scattermoe",
    "a GPU for Triton, `pip install git+https://github.com/shawntan/scattermoe`",
    contestant,
    experts_forward,
    capability=(8, 0),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
)
