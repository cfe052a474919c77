"""Our own CUDA kernels that choose the experts of tokens, and give the gradient of their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream
from ..problems.choice import SCORES, ChoiceRule, Choosing, ChoosingBackward, Chosen

NAME = "fusible"
MAX_EXPERTS = 4096
MAX_CHOICES = 32
MAX_LIMITED_GROUPS = 32
MAX_TOKENS = 2**25


def refusal(p: Choosing | ChoosingBackward) -> str | None:
    """Why the kernels do not take the problem; None: they do."""
    (tokens, experts), rule = p.logits.shape, p.rule
    if (why := hardware_refusal(p.logits)) is not None:
        return why
    if p.logits.dtype not in TYPE_CODES:
        return f"needs logits of 16 or 32 bits, got {p.logits.dtype}"
    if experts > MAX_EXPERTS or rule.top_k > MAX_CHOICES or tokens > MAX_TOKENS:
        most = f"{MAX_EXPERTS} experts, {MAX_CHOICES} choices and 2^25 tokens"
        return f"takes at most {most}, got {experts}, {rule.top_k} and {tokens}"
    if rule.groups > MAX_LIMITED_GROUPS or rule.best > 2:
        return f"takes at most {MAX_LIMITED_GROUPS} groups by their best 1 or 2, got {rule.groups} by {rule.best}"
    if isinstance(p, Choosing) and p.bias is not None and p.bias.dtype != torch.float32:
        return f"needs a selection bias of float32, got {p.bias.dtype}"
    return None


def run(p: Choosing | ChoosingBackward) -> None:
    """Fills ``out`` of a problem that is not refused."""
    assert p.out is not None
    if isinstance(p, Choosing):
        forward(p, p.out)
    else:
        backward(p, p.out)


def forward(p: Choosing, out: Chosen) -> None:
    """Fills ``out``."""
    logits, read = p.logits.contiguous(), (p.bias, p.valid, p.fixed_ids)
    bias, valid, fixed_ids = (None if t is None else t.contiguous() for t in read)
    tokens, experts = logits.shape
    size = compiled().choose_workspace(tokens=tokens, experts=experts, tallied=p.rule.tallied)
    workspace = logits.new_empty(size, dtype=torch.uint8)
    compiled().choose(
        **_common(logits, p.rule),
        groups=p.rule.groups,
        keep=p.rule.keep,
        best=p.rule.best,
        bias=address(bias),
        valid=address(valid),
        given=address(fixed_ids),
        ids=out.ids.data_ptr(),
        weights=out.weights.data_ptr(),
        counts=out.counts.data_ptr(),
        slots=address(out.slots),
        sums=address(out.sums),
        squares=address(out.squares),
        workspace=workspace.data_ptr(),
    )


def backward(p: ChoosingBackward, out: Tensor) -> None:
    """Fills ``out``, the gradient of the logits."""
    read = (None if t is None else t.contiguous() for t in (p.d_weights, p.d_sums, p.d_squares))
    logits, ids, (d_weights, d_sums, d_squares) = p.logits.contiguous(), p.ids.contiguous(), read
    compiled().choose_backward(
        **_common(logits, p.rule),
        ids=ids.data_ptr(),
        d_weights=address(d_weights),
        d_sums=address(d_sums),
        d_squares=address(d_squares),
        d_logits=out.data_ptr(),
    )


def _common(logits: Tensor, rule: ChoiceRule) -> dict[str, object]:
    """The common arguments of both launches."""
    device, (tokens, experts) = logits.get_device(), logits.shape
    return {
        "device": device,
        "stream": stream(device),
        "logits": logits.data_ptr(),
        "type": TYPE_CODES[logits.dtype],
        "tokens": tokens,
        "experts": experts,
        "top_k": rule.top_k,
        "scores": SCORES.index(rule.scores),
        "normalize": rule.normalize,
        "scale": rule.scale,
    }
