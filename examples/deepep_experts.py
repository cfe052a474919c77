"""Experts between the dispatch and the combine of DeepEP 2, on one host or several.

Written for ``deep_ep.ElasticBuffer`` of DeepEP V2 (commit dd758ca, 2026). It needs Hopper GPUs, and between hosts RDMA
that GPUs start themselves.

    buffer = buffer_for(group, max_tokens=4096, hidden=2048, top_k=8)  # one for all layers
    layer = DeepEPExperts(buffer, num_experts=128, experts=fusible.Sequential(...))  # linears of this rank's experts
    y = layer(x, top_k_index, top_k_weights)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


def buffer_for(group: dist.ProcessGroup, max_tokens: int, hidden: int, top_k: int) -> Any:
    """DeepEP's buffer; rows of an expert come in the order of their tokens, and a token's rows are summed once."""
    import deep_ep

    options = {"deterministic": True, "allow_multiple_reduction": False}
    return deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=max_tokens, hidden=hidden, num_topk=top_k, **options)


class DeepEPExperts(nn.Module):
    """A layer of experts that DeepEP brings the rows.

    Args:
        buffer: of :func:`buffer_for`.
        num_experts: of all ranks.
        experts: takes rows [Q, H], ``split_sizes`` and ``scales``, as linears around a ``ScaledSwiGLU`` do.
    """

    def __init__(self, buffer: Any, num_experts: int, experts: nn.Module) -> None:
        super().__init__()
        self.buffer, self.num_experts, self.experts = buffer, num_experts, experts

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] in bfloat16, from tokens [T, H], ids and float32 weights [T, k]; ids of no expert add nothing."""
        ids = torch.where((top_k_index >= 0) & (top_k_index < self.num_experts), top_k_index, -1).long()
        dispatch: Any = _Dispatch.apply
        rows, scales, sizes, handle = dispatch(x, ids, top_k_weights.float(), self.buffer, self.num_experts)
        y = self.experts(rows, split_sizes=sizes, scales=scales)
        combine: Any = _Combine.apply
        summed: Tensor = combine(y, self.buffer, handle)
        return summed


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, buffer: Any, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        rows, _, scales, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=num_experts, expert_alignment=1, do_expand=True
        )
        ctx.buffer, ctx.handle = buffer, handle
        sizes = handle.num_unaligned_recv_tokens_per_expert
        ctx.mark_non_differentiable(sizes)
        return rows, scales, sizes, handle

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        drows, dscales, *_ = gradients
        dx, dweights, _ = ctx.buffer.combine(drows.contiguous(), ctx.handle, topk_weights=dscales.contiguous())
        return dx, None, dweights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        y: Tensor = buffer.combine(rows, handle)[0]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        drows = ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle, do_expand=True)[0]
        return drows, None, None
