"""Experts of another framework on the rows of an exchange: each row is a token of one expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .shared_exchange import ExchangeOps

ExpertsOfRows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows [Q, H], the local expert of each [Q, 1], and weights of one [Q, 1] -> outputs [Q, H]."""


def run(
    ops: ExchangeOps, experts: ExpertsOfRows, num_experts: int, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Sends tokens [T, H] to the ranks of their experts, runs ``experts`` on the rows, and returns the weighted sums
    [T, H].

    Args:
        experts: runs the experts of this rank. Rows of no expert have the id ``num_experts``. It is never called
            without rows: a rank that owns none gives it one of zeros, so that parameters take part in the backward.
        num_experts: the number of experts of this rank.
    """
    rows, sizes, scales, row_of_slot = ops.dispatch(x, top_k_index=top_k_index, top_k_weights=top_k_weights)
    count = rows.shape[0]
    of_none = count - sizes.sum(dtype=sizes.dtype)
    ids = torch.arange(num_experts + 1, device=rows.device)
    local = torch.repeat_interleave(ids, torch.cat((sizes, of_none.view(1))), output_size=count)[:, None]
    if count == 0:
        rows, local = rows.sum(0, keepdim=True), local.new_zeros(1, 1)
    y = experts(rows, local, torch.ones_like(local, dtype=rows.dtype))[:count]
    combined: Tensor = ops.weighted_combine(y, scales=scales, row_of_slot=row_of_slot)
    return combined
