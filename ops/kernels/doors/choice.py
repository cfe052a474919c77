"""The door to the choice of experts: one kernel of ours forward and one backward, or PyTorch's operations.

As with the order of rows, only our own kernels are custom ops. Such an op may run on another device than it was traced
on, or under other switches. So it asks again when it runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....fuser.contract import tracing as trace
from ..dispatch import native_refusal
from ..hopper import choice as hopper
from ..operators.custom_ops import kernel
from ..problems.choice import SCORES, Choosing, ChoosingBackward, Chosen, Rule
from ..problems.gemm import nbytes
from ..pytorch import choice as pytorch
from ..pytorch.choice import log_scores, probabilities, tokens_per_expert, wide

__all__ = [
    "SCORES",
    "Choosing",
    "ChoosingBackward",
    "Chosen",
    "Rule",
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
        chosen = pytorch.forward(p)
        _record(why, "choose", p.bytes + nbytes(*chosen), p.logits)
        return chosen
    return choose_experts(p.logits, p.rule, p.bias, p.valid, p.fixed_ids, True)


def choose_backward(p: ChoosingBackward) -> Tensor:
    """The gradient of the logits."""
    why = _refusal(p)
    if why is not None:
        gradient = pytorch.backward(p)
        _record(why, "choose backward", p.bytes + nbytes(gradient), p.logits)
        return gradient
    return choose_experts_backward(p.logits, p.rule, p.ids, p.d_weights, p.d_sums, p.d_squares, True)


def _new_choice(logits: Tensor, rule: Rule) -> Chosen:
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, rule.top_k, dtype=torch.promote_types(logits.dtype, torch.float32))
    ids, counts = (logits.new_empty(shape, dtype=torch.int64) for shape in ((tokens, rule.top_k), (experts,)))
    if not rule.tallied:
        return Chosen(weights, ids, counts, None, None, None)
    sums, squares = (logits.new_empty(size, dtype=weights.dtype) for size in (experts, 1))
    return Chosen(weights, ids, counts, logits.new_empty(experts + 1, dtype=torch.int64), sums, squares)


@kernel(_new_choice, obeys_switches=False, eager_only=("is_native",))
def choose_experts(
    logits: Tensor,
    rule: Rule,
    bias: Tensor | None,
    valid: Tensor | None,
    fixed_ids: Tensor | None,
    is_native: bool = False,
) -> Chosen:
    """:func:`choose`, by our own kernel.

    Args:
        is_native: whether it is known to take these.
    """
    p = Choosing(logits, rule, bias, valid, fixed_ids)
    if not is_native and _refusal(p) is not None:
        return pytorch.forward(p)
    out = _new_choice(logits, rule)
    if trace.active():
        _record(None, "choose", p.bytes + nbytes(*out), logits)
    else:
        hopper.forward(p, out)
    return out


def _new_gradient(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@kernel(_new_gradient, obeys_switches=False, eager_only=("is_native",))
def choose_experts_backward(
    logits: Tensor,
    rule: Rule,
    ids: Tensor,
    d_weights: Tensor | None,
    d_sums: Tensor | None,
    d_squares: Tensor | None,
    is_native: bool = False,
) -> Tensor:
    """:func:`choose_backward`, by our own kernel.

    Args:
        is_native: whether it is known to take these.
    """
    p = ChoosingBackward(logits, rule, ids, d_weights, d_sums, d_squares)
    if not is_native and _refusal(p) is not None:
        return pytorch.backward(p)
    out = _new_gradient(logits)
    if trace.active():
        _record(None, "choose backward", p.bytes + nbytes(out), logits)
    else:
        hopper.backward(p, out)
    return out


def _refusal(p: Choosing | ChoosingBackward) -> str | None:
    if trace.is_traced(p.logits) and not p.logits.is_cuda:
        return "is traced for another device"
    return native_refusal(lambda: hopper.refusal(p), "choice of experts", p.logits)


def _record(why: str | None, name: str, nbytes: int, read: Tensor) -> None:
    """Tells a trace, if there is one, of a kernel; and why not of ours, which on a CPU nobody expects."""
    if trace.active():
        kernel = f"{hopper.NAME} ({name})" if why is None else pytorch.NAME
        trace.record(trace.KernelCall(kernel, why if why and read.is_cuda else "", 0, nbytes))
