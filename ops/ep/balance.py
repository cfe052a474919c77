"""Assignment of experts to ranks such that all ranks have about the same number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor


def balanced_order(loads: Tensor | Sequence[float], ranks: int) -> Tensor:
    """Returns an order of experts in which the ranks of a :class:`Group` have about equal loads.

    Experts are taken by falling load. Each goes to the rank with the smallest load among those with room. Expert
    ``order[i]`` becomes expert ``i``: apply the order to the router's rows, the experts' weights and their optimizer
    states, and the model computes the same function.

    Args:
        loads: [E], the number of rows that each expert has had.
        ranks: the number of ranks of the group; each owns E / ranks experts.

    Returns:
        int64 [E], on the CPU: the experts of the first rank, then of the second, and so on; ascending in each.

    Raises:
        ValueError: a load is not a finite number of at least 0, or ``ranks`` does not divide the number of experts.
    """
    of_experts = torch.as_tensor(loads, dtype=torch.float64, device="cpu").detach()
    if of_experts.dim() != 1 or not bool((of_experts.isfinite() & (of_experts >= 0)).all()):
        raise ValueError(f"balanced_order: loads must be [E] finite numbers from 0 on, got {loads}")
    if type(ranks) is not int or ranks < 1 or len(of_experts) % ranks:
        raise ValueError(f"balanced_order: ranks must divide the {len(of_experts)} experts, got {ranks!r}")
    owned: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for expert in of_experts.argsort(descending=True, stable=True).tolist():
        load, rank = heappop(heap)
        owned[rank].append(expert)
        if len(owned[rank]) < len(of_experts) // ranks:
            heappush(heap, (load + float(of_experts[expert]), rank))
    return torch.tensor([expert for experts in owned for expert in sorted(experts)], dtype=torch.int64, device="cpu")
