"""Identity experts: ids beyond the real experts, each of which gives the token itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads, Op, Outputs, Promises, TensorSpec
from ..values.checks import check_floats, check_sizes
from .moe import check_choices


class IdentityExperts(Op):
    """Passes tokens on, and gives their share of identity experts as the extra output ``identity``.

    ``identity = x * (the sum of a token's weights whose ids are num_experts or more)``: the zero experts of
    LongCat-Flash (arxiv 2509.01322, equation 1). :class:`Dispatch` ignores such ids. A layer with identity experts is::

        Sequential(IdentityExperts(E), Dispatch(E), ..., Combine(), AddExtraInput("identity"))

    The router of the layer chooses from more than E experts.

    Args:
        num_experts: E, the number of experts without the identity experts.

    Keyword Args:
        top_k_index: int32 or int64 [T, k], the experts of each token.
        top_k_weights: floating-point [T, k], the routing weights.
    """

    extra_outputs = ("identity",)
    promises = Promises(values_checked=frozenset())

    class Saved(NamedTuple):
        x: Tensor | None
        share: Tensor
        is_identity: Tensor
        weights_dtype: torch.dtype

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        check_sizes("IdentityExperts", None, num_experts=num_experts)
        self.num_experts = num_experts

    def check(self, x: TensorSpec, *, top_k_index: Tensor, top_k_weights: Tensor) -> Mapping[str, TensorSpec]:
        check_floats(x)
        check_choices(top_k_index, top_k_weights, x)
        return {"y": x, "identity": x}

    def fwd(
        self, x: Tensor, *, top_k_index: Tensor, top_k_weights: Tensor, needs_grad: frozenset[str]
    ) -> tuple[Outputs, Saved]:
        is_identity = top_k_index >= self.num_experts
        wide = torch.promote_types(torch.promote_types(x.dtype, top_k_weights.dtype), torch.float32)
        share = top_k_weights.to(wide).masked_fill(~is_identity, 0).sum(-1, keepdim=True)
        kept = x if "top_k_weights" in needs_grad else None
        saved = self.Saved(kept, share, is_identity, top_k_weights.dtype)
        return {"y": x.view_as(x), "identity": (x * share).to(x.dtype)}, saved

    def bwd(self, saved: Saved, dy: Tensor, *, identity: Tensor) -> Grads:
        x, share, is_identity, weights_dtype = saved
        grads: dict[str, Gradient] = {"x": lambda: dy + (identity * share).to(dy.dtype)}
        if x is not None:
            dots = (identity.to(share.dtype) * x).sum(-1, keepdim=True)
            grads["top_k_weights"] = lambda: torch.where(is_identity, dots, 0).to(weights_dtype)
        return grads

    def extra_repr(self) -> str:
        return str(self.num_experts)
