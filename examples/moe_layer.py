"""A mixture-of-experts layer from its ops: router, dispatch, experts, combine.

``fusible.MoE`` provides such a layer. This one shows how to write your own.

Run it with ``python -m fusible.examples.moe_layer``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fusible


class Router(nn.Module):
    """Sends every token to the ``top_k`` experts of the highest probability."""

    def __init__(self, features: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.gate = nn.Linear(features, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of each token [T, top_k], their weights, and a load-balancing loss with minimum 1 at an even
        load.
        """
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)
        top, chosen = probabilities.topk(self.top_k, -1)
        used = (chosen.flatten().unsqueeze(1) == torch.arange(self.experts, device=x.device)).sum(0)
        # the share of rows that an expert gets, times the probability that it is given: arXiv 2101.03961, section 2.2
        balance = self.experts * (used / used.sum() * probabilities.mean(0)).sum()
        return chosen, top / top.sum(-1, keepdim=True), balance


class MoELayer(nn.Module):
    """Experts of the form ``W2 (swiglu(W1 x) * weight)`` with their permutations, computed as one fused op."""

    def __init__(
        self, features: int, hidden: int, experts: int = 8, top_k: int = 2, group: fusible.ep.Group | None = None
    ) -> None:
        super().__init__()
        self.router = Router(features, experts, top_k)
        first: fusible.Op = fusible.Dispatch(experts)  # gives split sizes and scales to the ops behind it
        last: fusible.Op = fusible.Combine()
        if group is not None:  # each rank has some of the experts, and tokens travel to them
            first, last, experts = fusible.ep.EPDispatch(group), fusible.ep.EPCombine(group), group.num_local_experts
        self.experts = fusible.Sequential(
            first,
            fusible.GroupedLinear(experts, features, 2 * hidden, bias=False),
            fusible.SwiGLU(),
            fusible.Scale(),
            fusible.GroupedLinear(experts, hidden, features, bias=False),
            last,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the load-balancing loss."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights, balance = self.router(tokens)
        y = self.experts(tokens, top_k_index=chosen, top_k_weights=weights)
        return y.view_as(x), balance


def main() -> None:
    """Trains one step and shows how the layer runs."""
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
