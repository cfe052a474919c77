"""The door to the choice of experts: one kernel of ours forward and one backward, or PyTorch's operations.

As for routing, only our own kernels are custom ops. Such an op may run on another device than it was traced on, or
under other switches, so it checks again when it runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....fuser.contract import tracing as trace
from .. import dispatch
from ..operators.custom_ops import kernel
from ..problems.choice import SCORES, ChoiceRule, Choosing, ChoosingBackward, Chosen
from ..pytorch import choice as pytorch
from ..pytorch.choice import log_scores, probabilities, tokens_per_expert, wide

__all__ = [
    "SCORES",
    "ChoiceRule",
    "Choosing",
    "ChoosingBackward",
    "Chosen",
    "choose",
    "choose_backward",
    "log_scores",
    "probabilities",
    "tokens_per_expert",
    "wide",
]


def choose(p: Choosing) -> Chosen:
    """The experts of each token."""
    why = _refusal(p)
    if why is not None:
        p.out = pytorch.forward(p)
        _record(p, why)
        return p.out
    return choose_experts(p.logits, p.rule, p.bias, p.valid, p.fixed_ids)


def choose_backward(p: ChoosingBackward) -> Tensor:
    """The gradient of the logits."""
    why = _refusal(p)
    if why is not None:
        p.out = pytorch.backward(p)
        _record(p, why)
        return p.out
    return choose_experts_backward(p.logits, p.rule, p.ids, p.d_weights, p.d_sums, p.d_squares)


def _new_choice(logits: Tensor, rule: ChoiceRule) -> Chosen:
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, rule.top_k, dtype=torch.promote_types(logits.dtype, torch.float32))
    ids, counts = (logits.new_empty(shape, dtype=torch.int64) for shape in ((tokens, rule.top_k), (experts,)))
    if not rule.tallied:
        return Chosen(weights, ids, counts, None, None, None)
    sums, squares = (logits.new_empty(size, dtype=weights.dtype) for size in (experts, 1))
    return Chosen(weights, ids, counts, logits.new_empty(experts + 1, dtype=torch.int64), sums, squares)


@kernel(_new_choice, obeys_switches=False)
def choose_experts(
    logits: Tensor, rule: ChoiceRule, bias: Tensor | None, valid: Tensor | None, fixed_ids: Tensor | None
) -> Chosen:
    """:func:`choose`, by our own kernel."""
    out = _new_choice(logits, rule)
    p = Choosing(logits, rule, bias, valid, fixed_ids, out)
    return out if dispatch.is_solved(p) else pytorch.forward(p)


def _new_gradient(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@kernel(_new_gradient, obeys_switches=False)
def choose_experts_backward(
    logits: Tensor,
    rule: ChoiceRule,
    ids: Tensor,
    d_weights: Tensor | None,
    d_sums: Tensor | None,
    d_squares: Tensor | None,
) -> Tensor:
    """:func:`choose_backward`, by our own kernel."""
    out = _new_gradient(logits)
    p = ChoosingBackward(logits, rule, ids, d_weights, d_sums, d_squares, out)
    return out if dispatch.is_solved(p) else pytorch.backward(p)


def _refusal(p: Choosing | ChoosingBackward) -> str | None:
    if trace.is_traced(p.logits) and not p.logits.is_cuda:
        return "is traced for another device"
    return dispatch.refusal(p)


def _record(p: Choosing | ChoosingBackward, why: str) -> None:
    """Records PyTorch's operations in a trace, with the reason why they run, except on a CPU."""
    if trace.active():
        trace.record(trace.KernelCall(pytorch.NAME, why if p.logits.is_cuda else "", 0, p.bytes))
