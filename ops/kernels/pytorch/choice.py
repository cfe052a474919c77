"""A choice of experts, and its gradient, in PyTorch's operations: the formulas that kernels are tested against."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..problems.choice import ChoiceRule, Choosing, ChoosingBackward, Chosen

NAME = "torch"


def wide(logits: Tensor) -> Tensor:
    """The logits in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_scores(logits: Tensor, scores: str) -> Tensor:
    """The logarithms of scores; of softmax without the constant of each row."""
    if scores == "softmax":
        return logits
    return F.logsigmoid(logits) if scores == "sigmoid" else _log_softplus(logits) / 2


def probabilities(logits: Tensor, scores: str) -> Tensor:
    """[T, E]: the scores of each token, divided by their sum."""
    return log_scores(logits, scores).softmax(-1)


def tokens_per_expert(top_k_index: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how many tokens chose each expert. It stays on the device, and waits for nothing.

    An id below 0, or of E or more, is of no expert, and is not counted.
    """
    ids = top_k_index.flatten().long()
    ids = ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[:num_experts]


def forward(p: Choosing) -> Chosen:
    """The experts, their weights and counts, and the sums that losses read."""
    logits, rule = wide(p.logits), p.rule
    if p.valid is not None:
        logits = logits.masked_fill(~p.valid.unsqueeze(-1), 0)
    ids = _choose(logits, rule, p.bias)
    if p.fixed_ids is not None:
        ids = torch.where((p.fixed_ids == -1).all(-1, keepdim=True), ids, p.fixed_ids)
    if p.valid is not None:
        ids = ids.masked_fill(~p.valid.unsqueeze(-1), -1)
    weights = rule.scale * _weights(logits, ids, rule)
    counts = tokens_per_expert(ids, logits.shape[-1])
    return Chosen(weights, ids, counts, *(_tallies(logits, ids, rule) if rule.tallied else (None, None, None)))


def backward(p: ChoosingBackward) -> Tensor:
    """The gradient of the logits, of their dtype."""
    logits, rule = wide(p.logits), p.rule
    alive = ~_of_no_token(p.ids)
    logits = logits.masked_fill(~alive, 0)
    d = torch.zeros_like(logits)
    if p.d_weights is not None:
        d = _of_weights(logits, rule, p.ids, p.d_weights.to(logits.dtype))
    counted = alive & _is_regular(logits)
    safe = logits.masked_fill(~counted, 0)
    if p.d_sums is not None:
        chances = probabilities(safe, rule.scores)
        pull = chances * p.d_sums
        dense = (pull - chances * pull.sum(-1, keepdim=True)) * _slope(safe, rule.scores)
        d = d + dense.masked_fill(~counted | (safe == -math.inf), 0)
    if p.d_squares is not None:
        dense = 2 * p.d_squares * safe.logsumexp(-1, keepdim=True) * safe.softmax(-1)
        d = d + dense.masked_fill(~counted, 0)
    return d.masked_fill(~alive, 0).to(p.logits.dtype)


def _choose(logits: Tensor, rule: ChoiceRule, bias: Tensor | None) -> Tensor:
    """int64 [T, k]: the experts with the highest keys: scores with the bias, or logits where nothing needs scores."""
    if bias is None and rule.groups == 1:
        return _best(logits, rule.top_k)
    keys = _shares(logits) if rule.scores == "softmax" else log_scores(logits, rule.scores).exp()
    keys = keys.masked_fill(logits == -math.inf, 0)  # in a row of -inf alone, too
    keys = keys if bias is None else keys + bias
    return _best(keys if rule.groups == 1 else _within_groups(keys, rule), rule.top_k)


def _best(keys: Tensor, count: int) -> Tensor:
    """The positions of the highest keys of each row, int64 [T, count], equal ones in order; ``topk``
    promises no order.
    """
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _within_groups(keys: Tensor, rule: ChoiceRule) -> Tensor:
    """The keys; -inf for experts outside of the best groups of their token."""
    by_group = keys.view(-1, rule.groups, keys.shape[-1] // rule.groups)
    of_groups = by_group.topk(min(rule.best, by_group.shape[-1]), dim=-1).values.sum(-1)
    outside = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, _best(of_groups, rule.keep), False)
    return by_group.masked_fill(outside.unsqueeze(-1), -math.inf).view(keys.shape)


def _weights(logits: Tensor, ids: Tensor, rule: ChoiceRule) -> Tensor:
    """The scores at the ids, [T, k], without the scale; 0 for no expert, or where a logit of -inf excludes it."""
    if rule.scores == "softmax" and not rule.normalize:
        return _at(_shares(logits), ids).masked_fill(_chosen(logits, ids)[1], 0)
    chosen, never = _chosen(logits, ids)
    chosen = log_scores(chosen, rule.scores)
    if not rule.normalize:
        return chosen.masked_fill(never, 0).exp().masked_fill(never, 0)
    nothing = never.all(-1, keepdim=True)
    chosen = chosen.masked_fill(never & ~nothing, -math.inf).masked_fill(nothing, 0)
    return chosen.softmax(-1).masked_fill(never, 0)  # even beside NaN


def _chosen(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits at the ids, [T, k], and where there is no expert or a logit of -inf."""
    chosen = _at(logits, ids)
    return chosen, (ids < 0) | (ids >= logits.shape[-1]) | (chosen == -math.inf)


def _at(numbers: Tensor, ids: Tensor) -> Tensor:
    """The numbers at the ids, [T, k]; any of them where there is no expert."""
    return numbers.gather(-1, ids.clamp(0, numbers.shape[-1] - 1))


def _tallies(logits: Tensor, ids: Tensor, rule: ChoiceRule) -> tuple[Tensor, Tensor, Tensor]:
    counted = ~_of_no_token(ids) & _is_regular(logits)
    safe = logits.masked_fill(~counted, 0)
    slots = tokens_per_expert(ids.masked_fill(~counted, -1), logits.shape[-1])
    sums = probabilities(safe, rule.scores).masked_fill(~counted, 0).sum(0)
    squares = safe.logsumexp(-1, keepdim=True).square().masked_fill(~counted, 0).sum(0)
    return torch.cat((slots, counted.sum(0))), sums, squares


def _of_no_token(ids: Tensor) -> Tensor:
    """Whether all ids of a token are -1, bool [T, 1]; missing rows of given ids have been chosen by now."""
    return (ids == -1).all(-1, keepdim=True)


def _is_regular(logits: Tensor) -> Tensor:
    """Whether the highest logit is finite, bool [T, 1]; NaN counts as higher than all."""
    return logits.amax(-1, keepdim=True).isfinite()


def _of_weights(logits: Tensor, rule: ChoiceRule, ids: Tensor, d_weights: Tensor) -> Tensor:
    """The gradient through the weights, which only reaches chosen logits, except for softmax over all experts."""
    chosen, never = _chosen(logits, ids)
    weights = _weights(logits, ids, rule)
    product = rule.scale * d_weights * weights  # the gradients of the logarithms
    total = product.sum(-1, keepdim=True)
    d = product - weights * total if rule.normalize else product
    untouched = (d_weights == 0).all(-1, keepdim=True)  # whose gradient is 0, be the logits NaN
    d = (d * _slope(chosen, rule.scores)).masked_fill(never | untouched, 0)
    sparse = torch.zeros_like(logits).scatter_add(-1, ids.clamp(0, logits.shape[-1] - 1), d)
    if rule.normalize or rule.scores != "softmax":
        return sparse
    shares = _shares(logits)
    return sparse - (shares * total).masked_fill(untouched | (logits == -math.inf) | (shares == 0), 0)


def _shares(logits: Tensor) -> Tensor:
    """Softmax. Beside a logit of +inf, whose share is NaN, the others have 0, as by their logsumexp."""
    others = (logits.amax(-1, keepdim=True) == math.inf) & (logits != math.inf)
    return logits.softmax(-1).masked_fill(others, 0)


def _slope(logits: Tensor, scores: str) -> Tensor:
    """The derivative of the logarithm of a score by its logit."""
    if scores == "softmax":
        return torch.ones_like(logits)
    if scores == "sigmoid":
        return (-logits).sigmoid()
    return (F.logsigmoid(logits) - _log_softplus(logits)).exp() / 2


def _log_softplus(x: Tensor) -> Tensor:
    """``log(log(1 + exp(x)))``; below -30 it is x, to the last bit of float64."""
    return torch.where(x < -30, x, F.softplus(x.clamp(min=-30), threshold=40).log())
