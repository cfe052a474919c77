"""torchtitan's grouped experts on our fused op: same calls, checkpoint names and padding rows.

Run it with ``python -m fusible.examples.torchtitan_experts``; torchtitan is not needed. For a torchtitan job there is
``fusible.integrations.torchtitan``, an override of its own ``GroupedExperts``: see docs/torchtitan.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusible
from fusible.integrations import checkpoints

NAMES = ("fc1", "fc2")


class FusedExperts(nn.Module):
    """``GroupedExperts``: rows sorted by expert, and how many each has; router scores are applied after it, not here.

    Its checkpoints have ``w1``, ``w2`` and ``w3``, as torchtitan writes and reads them, while gate and up are one
    parameter and one product here.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        fc1 = fusible.GroupedLinear(num_experts, dim, 2 * hidden_dim, bias=False)
        fc2 = fusible.GroupedLinear(num_experts, hidden_dim, dim, bias=False)
        self.experts = fusible.Sequential()
        for name, op in (("fc1", fc1), ("act", fusible.SwiGLU()), ("fc2", fc2)):
            self.experts.add_module(name, op)
        self.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Maps rows [R, D] to [R, D]. Rows past the last expert's, left by a padding dispatcher, give zeros."""
        rows = x.to(self.experts.fc1.weight.dtype)  # type: ignore[union-attr, arg-type]
        y: Tensor = self.experts(rows, split_sizes=num_tokens_per_expert)
        return y.type_as(x)


def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Our two parameters as torchtitan's three."""
    inner = f"{prefix}experts."
    mine = {key.removeprefix(inner): state.pop(key) for key in list(state) if key.startswith(inner)}
    theirs = checkpoints.to_torchtitan(checkpoints.with_layout(mine, NAMES[0], "concat"), NAMES)
    state.update({f"{prefix}{name}": tensor for name, tensor in theirs.items()})


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Stores torchtitan's parameters under the name of the container, which reads them itself."""
    for name in ("w1", "w2", "w3", "w13", "w1_EFD", "w2_EDF", "w3_EFD"):
        if f"{prefix}{name}" in state:
            state[f"{prefix}experts.{name}"] = state.pop(f"{prefix}{name}")


def reference(weights: dict[str, Tensor], x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """The reference of torchtitan: three products for each expert."""
    y, start = torch.zeros_like(x), 0
    for i, size in enumerate(num_tokens_per_expert.tolist()):
        rows = x[start : start + size]
        hidden = F.silu(rows @ weights["w1"][i].mT) * (rows @ weights["w3"][i].mT)
        y[start : start + size] = hidden @ weights["w2"][i].mT
        start += size
    return y


def main() -> None:
    """Loads a checkpoint of torchtitan, computes the same output, and writes the checkpoint back."""
    torch.manual_seed(0)
    dim, hidden_dim, experts = 32, 64, 4
    weights = {
        name: torch.randn(experts, *shape) / shape[1] ** 0.5
        for name, shape in (("w1", (hidden_dim, dim)), ("w2", (dim, hidden_dim)), ("w3", (hidden_dim, dim)))
    }
    layer = FusedExperts(dim, hidden_dim, experts)
    layer.load_state_dict(weights)
    x, sizes = torch.randn(24, dim), torch.tensor([5, 0, 11, 4])  # the last four rows are padding
    y = layer(x, sizes)
    torch.testing.assert_close(y, reference(weights, x, sizes))
    saved = layer.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
    print(layer.experts.explain())
    print(f"the checkpoint has {', '.join(sorted(saved))}; the padding rows sum to {y[20:].abs().sum().item():.1f}")


if __name__ == "__main__":
    main()
