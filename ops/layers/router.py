"""A router: which experts each token goes to, and with which weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...fuser.contract.torch_private import serialized_as
from ..parameters.wide_buffers import WideBuffers
from ..values.checks import check_numbers, check_sizes

SCORES = ("softmax", "sigmoid")
_TINY = 1e-20  # keeps a sum of sigmoids away from zero, as DeepSeek-V3 does


@serialized_as("fusible.Routes")
class Routes(NamedTuple):
    """Where tokens go.

    Attributes:
        top_k_index: int64 [T, k], the experts of each token, the best one first.
        top_k_weights: [T, k], float32 at least, differentiable.
        probabilities: [T, E], the scores of each token, which add up to 1; differentiable.
    """

    top_k_index: Tensor
    top_k_weights: Tensor
    probabilities: Tensor


class Router(WideBuffers):
    """Sends every token to the ``top_k`` experts with the highest scores. It computes in float32, also under autocast.

    Among equal scores the expert with the lower number is chosen. Where neither a bias nor groups decide, logits are
    compared in place of scores, which may be equal though the logits are not: sigmoids of 30 and 31 are both 1.

    Args:
        features: H, the width of a token.
        num_experts: E.
        top_k: how many experts each token goes to.
        scores: ``"softmax"`` over the experts, or ``"sigmoid"`` of each (DeepSeek-V3, arxiv 2412.19437, equation 15).
        normalize: the weights of a token are divided by their sum.
        scale: a factor of every weight, applied last.
        groups: experts lie in this many groups of neighbours. A token may choose from ``top_groups`` of them, those
            with the highest sums of their two best scores.
        top_groups: see there.
        selection_bias: whether there is a buffer ``selection_bias`` [E], zero at first. It is added to the scores when
            experts are chosen, but is not part of the weights.

    Raises:
        ArgumentError: sizes that are not positive ints, a scale that is no number.
        ValueError: other scores; more choices than experts; groups that do not divide the experts, or hold too few.
    """

    selection_bias: Tensor | None
    wide_buffers = ("selection_bias",)  # in fewer bits its small steps would be lost

    def __init__(
        self,
        features: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        selection_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"features": features, "num_experts": num_experts, "top_k": top_k}
        check_sizes("Router", dtype, **sizes, groups=groups, top_groups=top_groups)
        check_numbers("Router", scale=scale)
        _check_choice(num_experts, top_k, scores, groups, top_groups)
        self.top_k, self.scores, self.normalize, self.scale = top_k, scores, normalize, scale
        self.groups, self.top_groups = groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, features, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weight.shape[0]

    def reset_parameters(self) -> None:
        """Draws the weight uniformly from ±1/sqrt(features), as ``torch.nn.Linear`` does. The selection bias is 0."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(self, x: Tensor) -> Routes:
        """The routes of tokens [T, H]."""
        logits = self._logits(x)
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        index = self._choose(logits.detach(), scores.detach())
        weights = scores.gather(-1, index)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        if self.scale != 1.0:
            weights = weights * self.scale
        probabilities = scores if self.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + _TINY)
        return Routes(index, weights, probabilities)

    def _logits(self, x: Tensor) -> Tensor:
        """[T, E]: few numbers, on which much depends, so that they are worth their bits (arxiv 2101.03961, 2.4)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
            return F.linear(x.to(dtype), self.weight.to(dtype))
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))

    def _choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        """int64 [T, k]: the best experts, the bias counted in."""
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        elif self.groups == 1:
            return _best(logits, self.top_k)
        return _best(self._within_groups(scores) if self.groups > 1 else scores, self.top_k)

    def _within_groups(self, scores: Tensor) -> Tensor:
        """The scores; -inf for experts outside of the best groups of their token."""
        by_group = scores.view(-1, self.groups, self.num_experts // self.groups)
        of_groups = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        best = _best(of_groups, self.top_groups)
        outside = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
        return by_group.masked_fill(outside.unsqueeze(-1), -math.inf).view(scores.shape)

    def extra_repr(self) -> str:
        groups = f", {self.top_groups} of {self.groups} groups" if self.groups > 1 else ""
        return f"{self.weight.shape[1]}, {self.top_k} of {self.num_experts}, {self.scores}{groups}"


def _best(keys: Tensor, count: int) -> Tensor:
    """int64 [T, count]: where the highest keys of each row stand, equal ones in order; ``topk`` promises no order."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _check_choice(num_experts: int, top_k: int, scores: str, groups: int, top_groups: int) -> None:
    if scores not in SCORES:
        raise ValueError(f"Router: scores must be one of {', '.join(SCORES)}, got {scores!r}")
    if top_k > num_experts:
        raise ValueError(f"Router: top_k must be at most num_experts={num_experts}, got {top_k}")
    if num_experts % groups or top_groups > groups:
        raise ValueError(
            f"Router: groups must divide num_experts={num_experts}, and top_groups be at most groups; "
            f"got groups={groups}, top_groups={top_groups}"
        )
    if top_k > num_experts // groups * top_groups:
        raise ValueError(
            f"Router: {top_groups} of {groups} groups hold {num_experts // groups * top_groups} experts, "
            f"which are fewer than top_k={top_k}"
        )
