"""Which experts tokens go to, and with which weights: from logits, in PyTorch's operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...fuser import ArgumentError
from ...fuser.torch_private import serialized_as
from ..checks import check_sizes
from .balance import tokens_per_expert

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True)
class Groups:
    """Experts lie in groups of neighbours, and a token chooses from some of them (arxiv 2412.19437, section 2.1.2).

    Args:
        count: how many groups there are.
        keep: how many a token chooses from: those with the highest sums of their best keys.
        best: how many keys of a group are added up: 2 in DeepSeek-V3, 1 in DeepSeek-V2.

    Raises:
        ArgumentError: numbers that are not positive ints.
        ValueError: more groups to keep than there are.
    """

    count: int
    keep: int
    best: int = 2

    def __post_init__(self) -> None:
        check_sizes("Groups", None, count=self.count, keep=self.keep, best=self.best)
        if self.keep > self.count:
            raise ValueError(f"Groups: keep must be at most count={self.count}, got {self.keep}")


@serialized_as("fusible.Routes")
class Routes(NamedTuple):
    """Where tokens go.

    Attributes:
        top_k_index: int64 [T, k], the experts of each token, the best one first; -1 for a token that is not valid.
        top_k_weights: [T, k], float32 at least, differentiable; 0 where there is no expert.
        tokens_per_expert: int64 [E].
        logits: [T, E], float32 at least, differentiable; 0 in rows that are not valid.
        scores: what the logits are made into.
    """

    top_k_index: Tensor
    top_k_weights: Tensor
    tokens_per_expert: Tensor
    logits: Tensor
    scores: str

    @property
    def probabilities(self) -> Tensor:
        """[T, E]: the scores of each token, divided by their sum; differentiable. Formed when it is asked for."""
        return log_scores(self.logits, self.scores).softmax(-1)


def route(
    logits: Tensor,
    top_k: int,
    *,
    scores: str = "softmax",
    normalize: bool | None = None,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: Groups | None = None,
    valid: Tensor | None = None,
    ids: Tensor | None = None,
) -> Routes:
    """Sends every token to the ``top_k`` experts with the highest keys; of equal ones the lower expert goes first.

    A key is a score plus the bias. Where neither a bias nor groups decide, logits are compared, as sigmoids of 30 and
    31 are both 1. Normalised weights come from logarithms of scores, so they add up to ``scale`` where all underflow.

    Args:
        logits: [T, E], of any floating-point dtype; computed in float32 at least.
        top_k: k, from 1 to E.
        scores: ``"softmax"`` over the experts, ``"sigmoid"`` of each (arxiv 2412.19437, equation 15), or
            ``"sqrtsoftplus"``, the square root of ``log(1 + exp(logit))``.
        normalize: the weights of a token are divided by their sum: for softmax, a softmax over the chosen logits.
            None: if ``top_k`` is above 1, as a single weight would be 1 and have no gradient.
        scale: a factor of every weight, applied last.
        bias: [E], added to the scores when experts are chosen; no part of the weights.
        groups: which experts a token may choose from.
        valid: bool [T], True for a real token. Others go to no expert, are not counted, and have no gradient, whatever
            their logits hold. A padding mask is ``valid=~mask``.
        ids: whole numbers [T, k]: the experts, given; the weights are those of today's logits. A row of -1 alone is
            missing, and chosen as without. Another id below 0, or of E or more, is of no expert, with the weight 0.

    Raises:
        ArgumentError: tensors of another shape or dtype.
        ValueError: other scores; more choices than there are experts.

    >>> import torch, fusible
    >>> logits = torch.tensor([[3.0, 1.0, 1.0, 2.0], [9.0, 0.0, 0.0, 0.0]])
    >>> routes = fusible.functional.route(logits, 2, valid=torch.tensor([True, False]))
    >>> routes.top_k_index.tolist(), routes.tokens_per_expert.tolist()
    ([[0, 3], [-1, -1]], [1, 0, 0, 1])
    """
    check_choice("route", logits.shape[-1], top_k, scores, groups)
    _check_tensors(logits, top_k, valid, ids)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if valid is not None:
        logits = logits.masked_fill(~valid.unsqueeze(-1), 0)
    index = _choose(logits.detach(), top_k, scores, bias, groups)
    if ids is not None:
        index = torch.where((ids == -1).all(-1, keepdim=True), index, ids.long())
    if valid is not None:
        index = index.masked_fill(~valid.unsqueeze(-1), -1)
    weights = _weights(logits, index, scores, top_k > 1 if normalize is None else normalize)
    weights = weights if scale == 1.0 else weights * scale
    return Routes(index, weights, tokens_per_expert(index, logits.shape[-1]), logits, scores)


def log_scores(logits: Tensor, scores: str) -> Tensor:
    """The logarithms of scores; of softmax without the constant of each row."""
    if scores == "softmax":
        return logits
    return F.logsigmoid(logits) if scores == "sigmoid" else _log_softplus(logits) / 2


def _log_softplus(x: Tensor) -> Tensor:
    """``log(log(1 + exp(x)))``; below -30 it is x, to the last bit of float64."""
    return torch.where(x < -30, x, F.softplus(x.clamp(min=-30), threshold=40).log())


def _choose(logits: Tensor, top_k: int, scores: str, bias: Tensor | None, groups: Groups | None) -> Tensor:
    """int64 [T, k]: the experts with the highest keys."""
    if bias is None and groups is None:
        return _best(logits, top_k)
    keys = logits.softmax(-1) if scores == "softmax" else log_scores(logits, scores).exp()
    keys = keys if bias is None else keys + bias
    return _best(keys if groups is None else _within_groups(keys, groups), top_k)


def _best(keys: Tensor, count: int) -> Tensor:
    """int64 [T, count]: where the highest keys of each row stand, equal ones in order; ``topk`` promises no order."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _within_groups(keys: Tensor, groups: Groups) -> Tensor:
    """The keys; -inf for experts outside of the best groups of their token."""
    by_group = keys.view(-1, groups.count, keys.shape[-1] // groups.count)
    of_groups = by_group.topk(min(groups.best, by_group.shape[-1]), dim=-1).values.sum(-1)
    outside = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, _best(of_groups, groups.keep), False)
    return by_group.masked_fill(outside.unsqueeze(-1), -math.inf).view(keys.shape)


def _weights(logits: Tensor, index: Tensor, scores: str, normalize: bool) -> Tensor:
    """[T, k]: the scores of the chosen experts; 0 for those that do not exist, or that a logit of -inf rules out."""
    exists = (index >= 0) & (index < logits.shape[-1])
    chosen = log_scores(logits.gather(-1, index.masked_fill(~exists, 0)), scores)
    never = ~exists | (chosen == -math.inf)
    if not normalize:
        chosen = chosen - logits.logsumexp(-1, keepdim=True) if scores == "softmax" else chosen
        return chosen.masked_fill(never, 0).exp().masked_fill(never, 0)
    nothing = never.all(-1, keepdim=True)
    chosen = chosen.masked_fill(never & ~nothing, -math.inf).masked_fill(nothing, 0)
    return chosen.softmax(-1).masked_fill(nothing, 0)


def check_choice(op: str, num_experts: int, top_k: int, scores: str, groups: Groups | None) -> None:
    """Raises for a choice that cannot be."""
    if scores not in SCORES:
        raise ValueError(f"{op}: scores must be one of {', '.join(SCORES)}, got {scores!r}")
    if top_k > num_experts:
        raise ValueError(f"{op}: top_k must be at most num_experts={num_experts}, got {top_k}")
    if groups is None:
        return
    if num_experts % groups.count:
        raise ValueError(f"{op}: groups must divide num_experts={num_experts}, got groups={groups.count}")
    held = num_experts // groups.count * groups.keep
    if top_k > held:
        raise ValueError(
            f"{op}: {groups.keep} of {groups.count} groups hold {held} experts, which are fewer than top_k={top_k}"
        )


def _check_tensors(logits: Tensor, top_k: int, valid: Tensor | None, ids: Tensor | None) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ArgumentError(f"route: logits must be floating-point [T, E], got {_form(logits)}")
    tokens = logits.shape[0]
    if valid is not None and (valid.dtype != torch.bool or valid.shape != (tokens,)):
        raise ArgumentError(
            f"route: valid must be bool [T], True for a real token, T={tokens}; got {_form(valid)}; "
            "a padding mask is valid=~mask"
        )
    whole = ids is None or not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids is not None and (not whole or ids.shape != (tokens, top_k)):
        raise ArgumentError(
            f"route: ids must be whole numbers [T, top_k], T={tokens}, top_k={top_k}, -1 for a missing row; "
            f"got {_form(ids)}"
        )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
