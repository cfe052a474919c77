"""Experts between the dispatch and the combine of NCCL EP, as TransformerEngine calls it, on one host or several.

Written for ``transformer_engine.pytorch.ep`` of TransformerEngine 2.20 (commit d0067d0, 2026). It needs Hopper GPUs and
NCCL 2.30.4 or newer, serves one group a process, and knows bfloat16 only. The order of an expert's rows is not
promised, so that weight gradients differ in the last bits between runs.

    buffer = buffer_for(group, num_experts=128, max_tokens=4096, hidden=2048, top_k=8, capacity=65536)
    layer = NCCLExperts(buffer, fusible.Sequential(...))  # linears of this rank's experts
    y = layer(x, top_k_index, top_k_weights)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch import distributed as dist


def buffer_for(
    group: dist.ProcessGroup, num_experts: int, max_tokens: int, hidden: int, top_k: int, capacity: int
) -> Any:
    """A buffer; a model takes one for each microbatch that is under way. Call it once for a group in a process.

    Args:
        capacity: the most rows of a rank.
    """
    from transformer_engine.pytorch import ep

    sizes = {"max_tokens_per_rank": max_tokens, "recv_capacity_per_rank": capacity, "hidden_dim": hidden}
    ep.ep_bootstrap(group, num_experts=num_experts, **sizes)
    return ep.EpBuffer(top_k=top_k, num_local_experts=num_experts // group.size(), **sizes)


class NCCLExperts(nn.Module):
    """A layer of experts that NCCL EP brings the rows.

    Args:
        buffer: of :func:`buffer_for`.
        experts: takes rows [Q, H], ``split_sizes`` and ``scales``, as linears around a ``ScaledSwiGLU`` do.
    """

    def __init__(self, buffer: Any, experts: nn.Module) -> None:
        super().__init__()
        self.buffer, self.experts = buffer, experts

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] in bfloat16, from tokens [T, H], ids of experts and weights [T, k]."""
        from transformer_engine.pytorch import ep

        rows, scales, sizes = ep.ep_dispatch(self.buffer, x, top_k_index, top_k_weights.float())
        y = self.experts(rows, split_sizes=sizes.clone(), scales=scales)  # the next dispatch writes the sizes anew
        summed: Tensor = ep.ep_combine(self.buffer, y, num_local_tokens=x.shape[0])
        return summed
