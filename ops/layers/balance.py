"""How evenly tokens are spread over experts: counts, a loss that prefers an even load, a bias that enforces one."""

from __future__ import annotations

import torch
from torch import Tensor


def tokens_per_expert(top_k_index: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how many tokens chose each expert. It stays on the device, and waits for nothing."""
    ids = top_k_index.flatten()
    return torch.zeros(num_experts, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """The load-balancing loss of the Switch Transformer without its factor alpha: ``E * sum over i of f_i P_i``.

    Arxiv 2101.03961, equations 4 to 6. ``f_i`` is the share of expert i in all choices, and ``P_i`` is the mean of its
    probability over the tokens. With k choices for each token the shares still add up to 1, so that the loss is 1 at an
    even load. The gradient flows through ``P`` alone, as counts have none. Without tokens the loss is 0.

    Args:
        probabilities: [T, E]; each row adds up to 1.
        counts: [E]: how many tokens chose each expert.
    """
    tokens, experts = probabilities.shape
    shares = counts.to(probabilities.dtype) / counts.sum().clamp(min=1)
    return experts * (shares * (probabilities.sum(0) / max(tokens, 1))).sum()


def balancing_step(counts: Tensor, rate: float) -> Tensor:
    """[E]: what to add to the selection bias after an optimiser step: ``rate * sign(mean load - load)``.

    Loss-free balancing, arxiv 2408.15664, algorithm 1.
    """
    load = counts.to(torch.float32)
    return rate * torch.sign(load.mean() - load)
