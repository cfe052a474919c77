"""Routing by PyTorch for libraries that only compute sorted rows: it sorts rows by expert and sums those of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .peer import ExpertsForward


class SortedRows(NamedTuple):
    """Rows of the experts in the order of the experts."""

    x: Tensor  # [T k, H]
    scales: Tensor  # [T k], float32
    split_sizes: Tensor  # [E]


# Rows, W1 with the rows of the gate first, W2; to the rows of the output.
SortedExperts = Callable[[SortedRows, Tensor, Tensor], Tensor]


def routed(experts: SortedExperts) -> ExpertsForward:
    """The experts of a transformers model, by a function of sorted rows."""

    def forward(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        require_swiglu(self)
        tokens, slots = top_k_index.shape
        order = top_k_index.reshape(-1).argsort(stable=True)
        sizes = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts)
        rows = SortedRows(x[order // slots], top_k_weights.reshape(-1)[order].float(), sizes)
        y = experts(rows, self.gate_up_proj, self.down_proj)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return y[back].view(tokens, slots, -1).sum(1)

    return forward


def require_swiglu(experts: Any) -> None:
    """Raises an error, which ``bench hf`` prints, unless the experts are plain SwiGLU experts.

    Raises:
        ValueError: they have biases, transposed weights, or another activation.
    """
    swiglu = experts.has_gate and experts.is_concatenated and getattr(experts.config, "hidden_act", "") == "silu"
    if not swiglu or experts.has_bias or experts.is_transposed:
        raise ValueError("it computes SwiGLU experts without bias only")
