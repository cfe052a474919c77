"""Stand-ins for DeepEP 2 and TransformerEngine's NCCL EP, on any process group: their names, arguments and results.

They gather everything from everyone. Rows behind the last expert's are NaN, where the engine leaves what was there.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist


def from_all(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


class Routes(NamedTuple):
    """The slots of all ranks that a rank's experts have rows of: expert, rank, token, slot, in this order."""

    slots: list[tuple[int, int, int, int]]
    sizes: Tensor
    shape: tuple[int, int]
    group: dist.ProcessGroup

    @classmethod
    def of(cls, ids: Tensor, experts: int, group: dist.ProcessGroup) -> Routes:
        each, rank = experts // group.size(), group.rank()
        found = [
            (expert - rank * each, source, token, slot)
            for source, choices in enumerate(from_all(ids, group))
            for token, row in enumerate(choices.tolist())
            for slot, expert in enumerate(row)
            if rank * each <= expert < (rank + 1) * each
        ]
        counts = torch.bincount(torch.tensor([f[0] for f in found], dtype=torch.int64), minlength=each)
        return cls(sorted(found), counts, (ids.shape[0], ids.shape[1]), group)

    def rows(self, tokens: Tensor, capacity: int) -> Tensor:
        of_ranks, out = from_all(tokens.detach(), self.group), tokens.new_full((capacity, tokens.shape[1]), torch.nan)
        for row, (_, source, token, _) in enumerate(self.slots):
            out[row] = of_ranks[source][token]
        return out

    def weights(self, weights: Tensor, capacity: int) -> Tensor:
        of_ranks, out = from_all(weights.detach(), self.group), weights.new_full((capacity,), torch.nan)
        for row, (_, source, token, slot) in enumerate(self.slots):
            out[row] = of_ranks[source][token, slot]
        return out

    def sums(self, rows: Tensor) -> Tensor:
        """The rows of each token of this rank, summed in float32 in the order of slots."""
        at_slots = torch.zeros(*self.shape, rows.shape[1])
        for slots, values in from_all((self.slots, rows.detach()), self.group):
            for row, (_, source, token, slot) in enumerate(slots):
                if source == self.group.rank():
                    at_slots[token, slot] = values[row].float()
        total = torch.zeros(self.shape[0], rows.shape[1])
        for slot in range(self.shape[1]):
            total += at_slots[:, slot]
        return total.to(rows.dtype)

    def numbers(self, numbers: Tensor) -> Tensor:
        out = torch.zeros(self.shape)
        for slots, values in from_all((self.slots, numbers.detach()), self.group):
            for row, (_, source, token, slot) in enumerate(slots):
                if source == self.group.rank():
                    out[token, slot] = values[row]
        return out


# -------------------------------------------------------------------------------------------------------- DeepEP


class ElasticBuffer:
    """With the arguments that the recipe may give, by the names of the original."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        *,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> None:
        assert deterministic
        assert not allow_multiple_reduction
        self.group, self.most, self.hidden, self.top_k = group, num_max_tokens_per_rank, hidden, num_topk

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        num_experts: int | None = None,
        expert_alignment: int | None = None,
        handle: Any = None,
        do_expand: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Any, Any]:
        assert do_expand
        assert x.is_contiguous()
        assert (x.dtype, x.shape[1]) == (torch.bfloat16, self.hidden)
        if handle is None:
            assert topk_idx is not None
            assert num_experts is not None
            assert topk_idx.dtype == torch.int64
            assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
            routes = Routes.of(topk_idx, num_experts, self.group)
            handle = SimpleNamespace(routes=routes, num_unaligned_recv_tokens_per_expert=routes.sizes.int())
        else:
            assert topk_idx is None
        routes = handle.routes
        count = len(routes.slots)
        weights = None if topk_weights is None else routes.weights(topk_weights, count)
        return routes.rows(x, count), None, weights, handle, None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, bias: Any = None
    ) -> tuple[Tensor, Tensor | None, Any]:
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert topk_weights is None or (topk_weights.dim() == 1 and topk_weights.dtype == torch.float32)
        numbers = None if topk_weights is None else handle.routes.numbers(topk_weights)
        return handle.routes.sums(x), numbers, None


def deep_ep() -> ModuleType:
    module = ModuleType("deep_ep")
    module.ElasticBuffer = ElasticBuffer  # type: ignore[attr-defined]
    return module


# ------------------------------------------------------------------------------------------- TransformerEngine


class EpBuffer:
    """With the arguments of the original; the sizes of an exchange are in one tensor of its own."""

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
    ) -> None:
        self.capacity, self.experts, self.hidden = recv_capacity_per_rank, num_local_experts, hidden_dim
        self.tokens_per_expert = torch.empty(num_local_experts, dtype=torch.int64)
        self.routes: Routes | None = None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: EpBuffer, routes: Routes, x: Tensor, weights: Tensor) -> Any:
        ctx.routes = routes
        ctx.mark_non_differentiable(buffer.tokens_per_expert)
        rows, scales = routes.rows(x, buffer.capacity), routes.weights(weights, buffer.capacity)
        return rows, scales, buffer.tokens_per_expert.copy_(routes.sizes)

    @staticmethod
    def backward(ctx: Any, drows: Tensor, dscales: Tensor, _: Any) -> Any:
        return None, None, ctx.routes.sums(drows), ctx.routes.numbers(dscales)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: EpBuffer, routes: Routes, rows: Tensor) -> Tensor:
        ctx.buffer, ctx.routes = buffer, routes
        return routes.sums(rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, None, ctx.routes.rows(dy.contiguous(), ctx.buffer.capacity)


def transformer_engine_ep() -> ModuleType:
    module: Any = ModuleType("transformer_engine.pytorch.ep")
    started: list[dist.ProcessGroup] = []

    def ep_bootstrap(
        ep_group: dist.ProcessGroup,
        num_experts: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int,
        hidden_dim: int,
        max_num_sms: int = 0,
        zero_copy: bool = False,
        eager: bool = False,
    ) -> None:
        assert not started, "ep_bootstrap was already called in this process"
        started.append(ep_group)

    def ep_dispatch(buffer: EpBuffer, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Any:
        assert tokens.dtype == torch.bfloat16
        assert topk_weights.dtype == torch.float32
        buffer.routes = Routes.of(topk_idx, buffer.experts * started[0].size(), started[0])
        return _Dispatch.apply(buffer, buffer.routes, tokens, topk_weights)

    def ep_combine(buffer: EpBuffer, expert_out: Tensor, *, num_local_tokens: int | None = None) -> Tensor:
        assert expert_out.dtype == torch.bfloat16
        assert buffer.routes is not None
        assert num_local_tokens == buffer.routes.shape[0]
        y: Tensor = _Combine.apply(buffer, buffer.routes, expert_out)
        return y

    module.EpBuffer, module.ep_bootstrap = EpBuffer, ep_bootstrap
    module.ep_dispatch, module.ep_combine = ep_dispatch, ep_combine
    return module
