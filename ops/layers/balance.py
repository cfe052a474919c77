"""Biases that balance the load of experts without a loss: their counts and their updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...fuser import ArgumentError
from ..routed.choose import SCORES, ChoiceRule, log_scores, wide
from ..values.checks import check_numbers, check_sizes, check_switches
from .route import Routes

_NUMBERS_AT_ONCE = 2**21
"""The scores that a histogram counts at once."""


class Balance(Protocol):
    """The update rule of a router's selection bias."""

    def check(self, num_experts: int, rule: ChoiceRule) -> None:
        """Raises ValueError for a routing rule that it cannot balance."""

    def shape(self, num_experts: int) -> tuple[int, ...]:
        """The shape of the counts."""

    def count(self, routes: Routes, bias: Tensor) -> Tensor:
        """Integers counted in a call, which are added up over calls and ranks."""

    def next_bias(self, bias: Tensor, load: Tensor, top_k: int) -> Tensor:
        """The bias after a step, float32 [E], from the counts since the last step."""


@dataclass(frozen=True)
class SignBias:
    """``bias_e += rate * sign(mean load - load_e)`` once a step (arxiv 2408.15664, algorithm 1).

    Args:
        rate: the size of a step; 1e-3 in DeepSeek-V3.
        centre: whether the mean of the step over the experts is subtracted from it, as in torchtitan.
    """

    rate: float
    centre: bool = False

    def __post_init__(self) -> None:
        check_numbers("SignBias", rate=self.rate)
        check_switches("SignBias", centre=self.centre)

    def check(self, num_experts: int, rule: ChoiceRule) -> None:
        """Accepts every rule."""

    def shape(self, num_experts: int) -> tuple[int, ...]:
        """One load per expert."""
        return (num_experts,)

    def count(self, routes: Routes, bias: Tensor) -> Tensor:
        """The slots of each expert, int64 [E]."""
        return routes.tokens_per_expert

    def next_bias(self, bias: Tensor, load: Tensor, top_k: int) -> Tensor:
        """The bias moved by one step."""
        step = balancing_step(load, self.rate)
        return bias + (step - step.mean() if self.centre else step)


@dataclass(frozen=True)
class QuantileBias:
    """The bias at which each expert would have had its share k / E of the tokens; there is no rate to tune.

    Kimi-K3 report, section 2.3.3 and appendix D. Let ``alpha_i`` be the (k + 1)-th highest biased score of token i. For
    token i to choose expert j, the bias must be ``r_ij = alpha_i - s_ij``. The next bias of an expert is the quantile k
    / E of its ``r_ij`` over the tokens, minus the mean of these quantiles over the experts. A histogram from the lowest
    bias minus 1 to the highest plus 1 counts the tokens of all microbatches and ranks.

    Args:
        bins: the number of bins of each expert's histogram, int64 [E, bins].
    """

    bins: int = 1000

    def __post_init__(self) -> None:
        check_sizes("QuantileBias", None, bins=self.bins)

    def check(self, num_experts: int, rule: ChoiceRule) -> None:
        """Accepts sigmoid scores without groups that leave experts out."""
        if rule.scores != "sigmoid" or rule.groups > 1:
            raise ValueError(
                "Router: QuantileBias needs scores='sigmoid' without groups, as scores lie between 0 and 1; got "
                f"scores={rule.scores!r}, groups={rule.groups}"
            )
        if rule.top_k == num_experts:
            raise ValueError(
                f"Router: QuantileBias needs experts that are not chosen; got top_k=num_experts={rule.top_k}"
            )

    def shape(self, num_experts: int) -> tuple[int, ...]:
        """One histogram per expert."""
        return (num_experts, self.bins)

    @torch.no_grad()
    def count(self, routes: Routes, bias: Tensor) -> Tensor:
        """The number of tokens that need each bias, int64 [E, bins]. Tokens without a finite one are left out.

        It counts some tokens after others, so that temporaries do not grow with their number.
        """
        experts, ids = bias.shape[0], routes.top_k_index
        total = torch.zeros(experts * self.bins, dtype=torch.int64, device=bias.device)
        begins = torch.arange(0, experts * self.bins, self.bins, device=bias.device)
        parts = [(routes.logits, ids)]
        if not torch.compiler.is_dynamo_compiling():  # which makes no temporaries of single operations
            few = max(1, _NUMBERS_AT_ONCE // experts)
            parts = [*zip(torch.split(routes.logits, few), torch.split(ids, few), strict=True)]
        for logits, chosen in parts:
            bins, counted = self._needed(log_scores(wide(logits), SCORES[routes.scores]).exp(), chosen, bias)
            total.scatter_add_(0, (bins + begins).flatten(), counted.expand_as(bins).flatten().long())
        return total.view(-1, self.bins)

    def _needed(self, scores: Tensor, ids: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The bins of the biases that tokens need, int64 [T, E], and which tokens count, bool [T, 1]."""
        cutoff = (scores + bias).topk(ids.shape[1] + 1, dim=-1).values[:, -1:]
        needed = cutoff - scores
        counted = (ids != -1).any(-1, keepdim=True) & needed.isfinite().all(-1, keepdim=True)
        low, high = _bounds(bias)
        position = (needed.masked_fill(~counted, 0) - low) * (self.bins / (high - low))
        return position.floor().long().clamp(0, self.bins - 1), counted

    def next_bias(self, bias: Tensor, load: Tensor, top_k: int) -> Tensor:
        """The quantiles; unchanged if no token was counted."""
        low, high = _bounds(bias)
        wanted = load.sum(-1, keepdim=True).double() * top_k / load.shape[0]
        before = load.cumsum(-1)
        at = (before < wanted).sum(-1, keepdim=True).clamp(max=self.bins - 1)
        inside = load.gather(-1, at)
        within = (wanted - (before.gather(-1, at) - inside)) / inside.clamp(min=1)
        position = (low + (at + within) * ((high - low) / self.bins)).squeeze(-1)
        return torch.where(load.sum() > 0, position - position.mean(), bias).to(bias.dtype)


def check_balance(op: str, balance: object) -> None:
    """Raises for what is not a balance."""
    if isinstance(balance, type) or not hasattr(balance, "next_bias"):
        raise ArgumentError(f"{op}: balance must be one such as SignBias(1e-3), got {balance!r}")


def balancing_step(counts: Tensor, rate: float) -> Tensor:
    """float32 [E]: the change of the selection bias after an optimiser step: ``rate * sign(mean load - load)``.

    Loads are compared as whole numbers, however large they are.
    """
    missing = counts.sum() - counts.numel() * counts
    return rate * missing.sign().to(torch.float32)


def _bounds(bias: Tensor) -> tuple[Tensor, Tensor]:
    """The range of the bias that scores between 0 and 1 can need (Kimi-K3 report, appendix D)."""
    return bias.min() - 1, bias.max() + 1
