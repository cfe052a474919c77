"""Losses of routers: each a factor and a formula over the tokens that count.

Tokens that are not valid, or whose highest logit is NaN or infinite, do not count. Without tokens a
loss is 0. Gradients flow through probabilities and logits alone, as counts have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...fuser import ArgumentError
from ..routed.choose import probabilities, tokens_per_expert, wide
from ..values.checks import check_numbers
from .route import check_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Tally:
    """The state of a router's call for its losses.

    Attributes:
        slots: int64 [E + 1]: the number of slots of each expert; last, the number of tokens.
        sums: [E]: the sums over these tokens of each expert's probability, differentiable.
        squares: [1]: the sum of the squared logsumexp of their logits, differentiable.
        logits: [T, E], differentiable.
        top_k_index: int64 [T, k].
        scores: the function that turns logits into scores.
        sequences: the sequence of each token, int [T]; or the length of all sequences.
    """

    slots: Tensor
    sums: Tensor
    squares: Tensor
    logits: Tensor
    top_k_index: Tensor
    scores: str
    sequences: Tensor | int | None = None


class Loss(Protocol):
    """One term of a router's loss."""

    def __call__(self, tally: Tally, /) -> Tensor:
        """The loss of a call times its factor, a differentiable number."""


@dataclass(frozen=True)
class SwitchLoss:
    """``alpha * E * sum over i of f_i P_i``: the load-balancing loss of the Switch Transformer.

    Arxiv 2101.03961, equations 4 to 6. ``f_i`` is the share of expert i in all slots, and ``P_i`` is its mean
    probability over the tokens. The shares add up to 1 for any k, so the loss of an even load is alpha. Transformers
    computes k times this loss, over all layers together.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_numbers("SwitchLoss", alpha=self.alpha)

    def __call__(self, tally: Tally) -> Tensor:
        return self.alpha * _balance(tally.slots[:-1], tally.sums, tally.slots[-1])


@dataclass(frozen=True)
class GlobalLoss:
    """:class:`SwitchLoss` with the experts' shares in the tokens of all ranks, the global batch (arxiv 2501.11873).

    The mean over the ranks is the loss of all tokens together, even if ranks have different numbers of tokens. Each
    call reduces E + 1 whole numbers over ``group``, so all ranks must call the router equally often.

    Args:
        alpha: the factor.
        group: the ranks that have other tokens, as ``torch.distributed`` takes it; None: all ranks, or only this
            process if ``torch.distributed`` is not initialised.
    """

    alpha: float
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        check_numbers("GlobalLoss", alpha=self.alpha)

    def __call__(self, tally: Tally) -> Tensor:
        slots, ranks = tally.slots.clone(), 1
        if self.group is not None or torch.distributed.is_initialized():
            torch.distributed.all_reduce(slots, group=self.group)
            ranks = torch.distributed.get_world_size(self.group)
        return self.alpha * ranks * _balance(slots[:-1], tally.sums, slots[-1])


@dataclass(frozen=True)
class SequenceLoss:
    """The mean of :class:`SwitchLoss` over the sequences (DeepSeek-V3, arxiv 2412.19437, equations 17 to 20).

    The argument ``sequences`` of a call groups its tokens. Sequences without valid tokens are left out.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_numbers("SequenceLoss", alpha=self.alpha)

    def __call__(self, tally: Tally) -> Tensor:
        tokens, experts = tally.logits.shape
        of_token, most = _sequence_of_token(tally.sequences, tokens, tally.logits.device)
        logits = wide(tally.logits)
        left_out = ~logits.amax(-1).isfinite() | (tally.top_k_index == -1).all(-1)
        chances = probabilities(logits.masked_fill(left_out.unsqueeze(-1), 0), tally.scores)
        chances = chances.masked_fill(left_out.unsqueeze(-1), 0)
        sums = chances.new_zeros(most, experts).index_add(0, of_token, chances)
        sizes = tokens_per_expert(of_token.masked_fill(left_out, -1), most)
        ids = tally.top_k_index
        nowhere = left_out.unsqueeze(-1) | (ids < 0) | (ids >= experts)
        at = (of_token.unsqueeze(-1) * experts + ids).masked_fill(nowhere, -1)
        slots = tokens_per_expert(at, most * experts).view(most, experts)
        return self.alpha * _balance(slots, sums, sizes).sum() / (sizes > 0).sum().clamp(min=1)


@dataclass(frozen=True)
class ZLoss:
    """``beta * mean of logsumexp(logits)^2``, which keeps logits small (ST-MoE, arxiv 2202.08906, equation 5)."""

    beta: float

    def __post_init__(self) -> None:
        check_numbers("ZLoss", beta=self.beta)

    def __call__(self, tally: Tally) -> Tensor:
        return self.beta * tally.squares.sum() / tally.slots[-1].clamp(min=1)


def _balance(slots: Tensor, sums: Tensor, tokens: Tensor) -> Tensor:
    """``E * sum of f_i P_i`` over the last dimension."""
    shares = slots.to(sums.dtype) / slots.sum(-1, keepdim=True).clamp(min=1)
    return slots.shape[-1] * (shares * sums).sum(-1) / tokens.clamp(min=1)


def _sequence_of_token(sequences: Tensor | int | None, tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """The number of each token's sequence, int64 [T], and an upper bound of the numbers; waits for nothing."""
    if isinstance(sequences, int):
        return torch.arange(tokens, device=device) // sequences, -(-tokens // sequences)
    assert sequences is not None
    ordered, order = sequences.sort(stable=True)
    begins = torch.zeros_like(ordered, dtype=torch.int64)
    begins[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(begins).scatter_(0, order, begins.cumsum(0)), tokens


def checked_losses(op: str, losses: Sequence[Loss]) -> tuple[Loss, ...]:
    """The losses; raises for one without a sequence around it, and for what cannot be called."""
    listed = tuple(losses) if isinstance(losses, Iterable) and not isinstance(losses, Tensor) else (None,)
    if all(callable(loss) and not isinstance(loss, type) for loss in listed):
        return listed
    raise ArgumentError(f"{op}: losses must be a sequence of losses, such as (SwitchLoss(0.01),), got {losses!r}")


def check_sequences(op: str, losses: tuple[Loss, ...], sequences: object, logits: Tensor) -> None:
    """Raises for sequences that are missing, or that do not fit the tokens."""
    tokens = logits.shape[0]
    if sequences is None and any(isinstance(loss, SequenceLoss) for loss in losses):
        raise ArgumentError(
            f"{op}: SequenceLoss needs sequences, the number of each token's sequence, whole numbers [T], T={tokens}, "
            "or the length of all"
        )
    if sequences is None or (type(sequences) is int and sequences > 0 and tokens % sequences == 0):
        return
    if isinstance(sequences, Tensor):
        whole = not (sequences.is_floating_point() or sequences.is_complex() or sequences.dtype == torch.bool)
        if whole and sequences.shape == (tokens,):
            return check_device(op, logits, sequences=sequences)
        came = f"{str(sequences.dtype).removeprefix('torch.')} {list(sequences.shape)}"
    else:
        came = repr(sequences)
    raise ArgumentError(
        f"{op}: sequences must be whole numbers [T], T={tokens}, or a length that divides T; got {came}"
    )
