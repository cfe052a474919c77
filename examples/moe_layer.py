"""A mixture-of-experts layer: router, dispatch, experts, combine.

Run it with ``python -m fusible.examples.moe_layer``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import fusible


class Routing(NamedTuple):
    """Which tokens the experts see: row r is token ``tokens[r]``, and rows are sorted by expert."""

    tokens: Tensor  # [T * top_k]
    rows: Tensor  # [T, top_k]: where the rows of a token are; the other way round
    split_sizes: Tensor  # [E]: how many rows each expert has; stays on the device
    scales: Tensor  # [T * top_k]: how much each row counts
    balance: Tensor  # a loss that is smallest, 1, when all experts are used alike


class Router(nn.Module):
    """Sends every token to the ``top_k`` experts of the highest probability."""

    def __init__(self, features: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.gate = nn.Linear(features, experts, bias=False)

    def forward(self, x: Tensor) -> Routing:
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)
        top, chosen = probabilities.topk(self.top_k, -1)
        order = chosen.flatten().argsort(stable=True)  # rows of expert 0 first, then those of expert 1, …
        used = (chosen.flatten().unsqueeze(1) == torch.arange(self.experts, device=x.device)).sum(0)
        scales = (top / top.sum(-1, keepdim=True)).flatten()[order]
        # the share of rows that an expert gets, times the probability that it is given: arXiv 2101.03961, section 2.2
        balance = self.experts * (used / used.sum() * probabilities.mean(0)).sum()
        return Routing(order // self.top_k, order.argsort().view_as(chosen), used, scales, balance)


class MoELayer(nn.Module):
    """Experts of the form ``W2 (swiglu(W1 x) * scale)``, computed as one fused op."""

    def __init__(self, features: int, hidden: int, experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.router = Router(features, experts, top_k)
        self.experts = fusible.Sequential(
            fusible.GroupedLinear(experts, features, 2 * hidden, bias=False),
            fusible.SwiGLU(),
            fusible.Scale(),
            fusible.GroupedLinear(experts, hidden, features, bias=False),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the load-balancing loss."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        rows = tokens.index_select(0, routing.tokens)  # dispatch
        rows = self.experts(rows, split_sizes=routing.split_sizes, scales=routing.scales)
        combined = rows[routing.rows].sum(1)  # in a fixed order, unlike index_add on a GPU
        return combined.to(x.dtype).view_as(x), routing.balance


def main() -> None:
    """One step of training; shows how the layer runs."""
    torch.manual_seed(0)
    layer = MoELayer(features=64, hidden=128)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, target = torch.randn(2, 4, 16, 64)
    y, balance = layer(x)
    loss = (y - target).square().mean() + 0.01 * balance
    loss.backward()
    optimizer.step()
    print(layer.experts.explain())
    print(f"loss {loss.item():.4f}, load balance {balance.item():.4f} (1 is even)")


if __name__ == "__main__":
    main()
