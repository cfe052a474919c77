"""How evenly tokens are spread over experts: counts, a loss that prefers an even load, a bias that enforces one."""

from __future__ import annotations

import torch
from torch import Tensor


def tokens_per_expert(top_k_index: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how many tokens chose each expert. It stays on the device, and waits for nothing.

    An id below 0, or of E or more, is of no expert, and is not counted.
    """
    ids = top_k_index.flatten().long()
    ids = ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[:num_experts]


def balance_loss(probabilities: Tensor, top_k_index: Tensor) -> Tensor:
    """The load-balancing loss of the Switch Transformer without its factor alpha: ``E * sum over i of f_i P_i``.

    Arxiv 2101.03961, equations 4 to 6. ``f_i`` is the share of expert i in all choices, and ``P_i`` is the mean of its
    probability over the tokens. With k choices for each token the shares still add up to 1, so that the loss is 1 at an
    even load. The gradient flows through ``P`` alone, as counts have none. A token with a probability that is no number
    is in neither ``f`` nor ``P``. Without tokens the loss is 0.

    Args:
        probabilities: [T, E]; each row adds up to 1.
        top_k_index: [T, k]: the experts of each token.
    """
    experts = probabilities.shape[1]
    odd = ~probabilities.isfinite().all(-1, keepdim=True)
    counts = tokens_per_expert(top_k_index.masked_fill(odd, -1), experts)
    shares = counts.to(probabilities.dtype) / counts.sum().clamp(min=1)
    means = probabilities.masked_fill(odd, 0).sum(0) / (~odd).sum().clamp(min=1)
    return experts * (shares * means).sum()


def balancing_step(counts: Tensor, rate: float) -> Tensor:
    """float32 [E]: what to add to the selection bias after an optimiser step: ``rate * sign(mean load - load)``.

    Loss-free balancing, arxiv 2408.15664, algorithm 1. Loads are compared as whole numbers, however large they are.
    """
    missing = counts.sum() - counts.numel() * counts
    return rate * missing.sign().to(torch.float32)
