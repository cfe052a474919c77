"""Routes: the experts of tokens and their weights, from logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import ArgumentError
from ...fuser.contract.config import active_config, constant
from ...fuser.contract.spec import layout_of, not_dense
from ...fuser.contract.torch_private import serialized_as
from ...fuser.contract.tracing import has_no_data
from ...fuser.runtime.autograd import Runtime, run
from ..routed.choose import SCORES, ChoiceRule, Choose, probabilities, wide
from ..values.checks import check_numbers, check_sizes, check_switches, is_dense


@dataclass(frozen=True)
class Groups:
    """Groups of neighbouring experts, from some of which a token chooses (arxiv 2412.19437, section 2.1.2).

    Args:
        count: the number of groups.
        keep: the number of groups that a token chooses from: those with the highest sums of their best keys.
        best: the number of keys of a group that are added up: 2 in DeepSeek-V3, 1 in DeepSeek-V2.

    Raises:
        ArgumentError: a number is not a positive int.
        ValueError: ``keep`` is above ``count``.
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
    """The experts and weights of each token.

    Attributes:
        top_k_index: int64 [T, k], the experts of each token, the best one first; -1 for a token that is not valid.
        top_k_weights: [T, k], at least float32, differentiable; 0 without an expert.
        tokens_per_expert: int64 [E], the number of tokens that each expert got.
        logits: [T, E], the given logits, differentiable.
        scores: the position in ``SCORES`` of the function that makes scores of logits; exported programs hold no
            strings.
        loss: the sum of the losses of a :class:`Router`; None without losses.
    """

    top_k_index: Tensor
    top_k_weights: Tensor
    tokens_per_expert: Tensor
    logits: Tensor
    scores: int
    loss: Tensor | None = None

    @property
    def probabilities(self) -> Tensor:
        """The scores of each token divided by their sum, [T, E], differentiable; computed on access.

        Invalid tokens have equal probabilities without a gradient.
        """
        nowhere = (self.top_k_index == -1).all(-1, keepdim=True)
        return probabilities(wide(self.logits).masked_fill(nowhere, 0), SCORES[self.scores])


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
    """Sends every token to the ``top_k`` experts with the highest keys; among equal keys the lower expert goes first.

    A key is a score plus the bias. Without bias and groups, logits are compared, since rounded scores may be equal: the
    sigmoids of 30 and 31 are both 1. Normalised weights come from logarithms of scores, so they add up to ``scale``
    even if all scores underflow.

    Args:
        logits: [T, E], of any floating-point dtype; computed in at least float32.
        top_k: k, from 1 to E.
        scores: ``"softmax"`` over the experts (arxiv 2101.03961, equation 1), ``"sigmoid"`` of each (arxiv 2412.19437,
            equation 15), or ``"sqrtsoftplus"``, ``sqrt(log(1 + exp(logit)))`` (DeepSeek-V4).
        normalize: whether the weights of a token are divided by their sum (arxiv 2412.19437, equation 13): for softmax,
            a softmax over the chosen logits (arxiv 2401.04088, section 2.1). None: if ``top_k`` is above 1, as a single
            weight would be 1 and have no gradient.
        scale: a factor of every weight, applied last; ``routed_scaling_factor`` of DeepSeek-V2 (arxiv 2405.04434).
        bias: [E], added to the scores for the choice of experts, but not to the weights (arxiv 2408.15664).
        groups: the groups of experts, from some of which a token chooses; None: it chooses from all experts.
        valid: bool [T], True for a real token. Other tokens go to no expert, are not counted, and get no gradient,
            whatever their logits. A padding mask is ``valid=~mask``.
        ids: whole numbers [T, k], the experts of each token; the weights come from the logits. For a row of only -1 the
            experts are chosen. Another id below 0, or of E or more, belongs to no expert and has the weight 0.

    Raises:
        ArgumentError: a tensor of another shape or dtype; ``top_k`` is not a positive int, or ``scale`` not a number.
        ValueError: unknown scores; more choices than experts.

    >>> import torch, fusible
    >>> logits = torch.tensor([[3.0, 1.0, 1.0, 2.0], [9.0, 0.0, 0.0, 0.0]])
    >>> routes = fusible.functional.route(logits, 2, valid=torch.tensor([True, False]))
    >>> routes.top_k_index.tolist(), routes.tokens_per_expert.tolist()
    ([[0, 3], [-1, -1]], [1, 0, 0, 1])
    """
    check_sizes("route", None, top_k=top_k)
    check_numbers("route", scale=scale)
    if not (groups is None or isinstance(groups, Groups)):
        raise ArgumentError(f"route: groups must be a fusible.Groups, such as Groups(8, keep=4), got {groups!r}")
    check_tensors("route", logits, top_k, valid, ids)
    check_choice("route", logits.shape[1], top_k, scores, groups)
    _check_bias(logits, bias)
    rule = rule_of(top_k, scores, normalizes("route", top_k, normalize), scale, groups)
    if torch.compiler.is_dynamo_compiling():
        _register_with_dynamo()
        # one by one, because PyTorch 2.11 cannot trace vars() of a frozen dataclass
        numbers = (rule.top_k, rule.scores, rule.normalize, rule.scale, rule.groups, rule.keep, rule.best)
        index, weights, counts = _in_graph(logits, bias, valid, whole(ids), *numbers)
    else:
        index, weights, counts = _chosen(logits, rule, bias, valid, whole(ids))
    return Routes(index, weights, counts, logits, SCORES.index(scores))


def _chosen(
    logits: Tensor, rule: ChoiceRule, bias: Tensor | None, valid: Tensor | None, ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    keywords = {"selection_bias": bias, "valid": valid, "ids": ids}
    keywords = {name: value for name, value in keywords.items() if value is not None}
    weights, index, counts = run(_op(rule), logits, keywords, Runtime.of(logits))
    return index, weights, counts


def _in_graph(
    logits: Tensor, bias: Tensor | None, valid: Tensor | None, ids: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_chosen` with arguments that graphs can store."""
    return _chosen(logits, ChoiceRule(*rule), bias, valid, ids)


@constant
def _register_with_dynamo() -> None:
    """Registers the call as a node of the graph when it is first traced: the decorator imports the compiler."""
    torch.compiler.allow_in_graph(_in_graph)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=64)
def _op(rule: ChoiceRule) -> Choose:
    return Choose(rule)


def rule_of(
    top_k: int, scores: str, normalize: bool, scale: float, groups: Groups | None, tallied: bool = False
) -> ChoiceRule:
    """The rule in the form of the kernels."""
    limited = () if groups is None else (groups.count, groups.keep, min(groups.best, 2**31 - 1))
    return ChoiceRule(top_k, scores, normalize, float(scale), *limited or (1, 1, 1), tallied=tallied)


def normalizes(op: str, top_k: int, normalize: bool | None) -> bool:
    """Whether weights are normalised: by default all but single ones, which would be 1."""
    if normalize is None:
        return top_k > 1
    check_switches(op, normalize=normalize)
    return normalize


def whole(ids: Tensor | None) -> Tensor | None:
    """The ids in the form of the kernels."""
    return None if ids is None else ids.long()


def check_choice(op: str, num_experts: int, top_k: int, scores: str, groups: Groups | None) -> None:
    """Raises for an impossible choice."""
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


def check_tensors(op: str, logits: Tensor, top_k: int, valid: Tensor | None, ids: Tensor | None) -> None:
    """Raises for tensors of another shape or dtype; with ``config(debug=True)`` also for ids without an expert."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise ArgumentError(f"{op}: logits must be floating-point [T, E], got {form(logits)}")
    if logits.layout is not torch.strided:
        raise not_dense(f"{op}: logits", layout_of(logits))
    if valid is None and ids is None:
        return
    tokens, experts = logits.shape
    is_mask = isinstance(valid, Tensor) and valid.dtype == torch.bool
    if valid is not None and not (is_mask and valid.shape == (tokens,)):
        raise ArgumentError(
            f"{op}: valid must be bool [T], True for a real token, T={tokens}; got {form(valid)}; "
            "a padding mask is valid=~mask"
        )
    check_device(op, logits, valid=valid)
    if ids is None:
        return
    is_tensor = isinstance(ids, Tensor)
    is_whole = is_tensor and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not is_whole or ids.shape != (tokens, top_k):
        raise ArgumentError(
            f"{op}: ids must be whole numbers [T, top_k], T={tokens}, top_k={top_k}, -1 for a missing row; "
            f"got {form(ids)}"
        )
    check_device(op, logits, ids=ids)
    if active_config().debug and not torch.compiler.is_dynamo_compiling() and not has_no_data(ids):
        _check_ids(op, ids, experts)


def _check_bias(logits: Tensor, bias: Tensor | None) -> None:
    floating = isinstance(bias, Tensor) and bias.is_floating_point()
    if bias is not None and not (floating and bias.shape == logits.shape[1:]):
        raise ArgumentError(f"route: bias must be floating-point [E], E={logits.shape[1]}, got {form(bias)}")
    check_device("route", logits, bias=bias)


def check_device(op: str, logits: Tensor, /, **tensors: Tensor | None) -> None:
    """Raises for tensors that are sparse, or on another device than the logits."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not is_dense(tensor):
            raise not_dense(f"{op}: {name}", layout_of(tensor))
        if tensor.device != logits.device:
            raise ArgumentError(f"{op}: {name} must be on {logits.device}, as the logits, got {tensor.device}")


def _check_ids(op: str, ids: Tensor, experts: int) -> None:
    """Checks the values of ids; waits for the device."""
    wrong = ((ids.long() < -1) | (ids.long() >= experts)).any(-1).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        raise ArgumentError(f"{op}: ids must be from -1 to {experts - 1}, got {ids[row].tolist()} in row {row}")


def form(tensor: object) -> str:
    """The dtype and shape of a tensor; otherwise the type of the given value."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
