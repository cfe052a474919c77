"""The choice of experts as an op: logits to weights, ids and counts, and the sums that losses read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...fuser import Grads, Op, Outputs, Promises, TensorSpec
from ..kernels.doors import choice as door
from ..kernels.doors.choice import (
    SCORES,
    ChoiceRule,
    Choosing,
    ChoosingBackward,
    log_scores,
    probabilities,
    tokens_per_expert,
    wide,
)

__all__ = ["SCORES", "ChoiceRule", "Choose", "log_scores", "probabilities", "tokens_per_expert", "wide"]


class Choose(Op):
    """Logits [T, E] to the weights [T, k] of the experts of each token.

    ====================  ==================  ====================================================================
    extra output          shape, dtype        contents
    ====================  ==================  ====================================================================
    ``top_k_index``       [T, k], int64       the experts, the best one first; -1 for a token that is not valid
    ``counts``            [E], int64          the slots of each expert
    ``slots``             [E + 1], int64      the same of the tokens in the sums; last, how many tokens those are
    ``sums``              [E]                 the sums over tokens of each expert's probability, differentiable
    ``squares``           [1]                 the sum of the squared logsumexp of the logits, differentiable
    ====================  ==================  ====================================================================

    The last three exist only with ``rule.tallied``. They leave out tokens that are not valid, and tokens whose highest
    logit is NaN or infinite.

    Keyword Args:
        selection_bias: [E], added to the scores that are compared; it has no gradient.
        valid: bool [T]; other tokens go to no expert.
        ids: int64 [T, k]: the experts, given; a row of -1 alone is missing, and chosen.
    """

    promises = Promises(replayable=True, values_checked=frozenset())

    class Saved(NamedTuple):
        logits: Tensor
        ids: Tensor

    def __init__(self, rule: ChoiceRule) -> None:
        super().__init__()
        self.rule = rule
        self.extra_outputs = ("top_k_index", "counts", *(("slots", "sums", "squares") if rule.tallied else ()))

    def check(
        self, x: TensorSpec, *, selection_bias: object = None, valid: object = None, ids: object = None
    ) -> dict[str, TensorSpec]:
        (tokens, experts), top_k = x.shape, self.rule.top_k
        wide = torch.promote_types(x.dtype, torch.float32)
        specs = {
            "y": TensorSpec((tokens, top_k), wide, x.device),
            "top_k_index": TensorSpec((tokens, top_k), torch.int64, x.device),
            "counts": TensorSpec((experts,), torch.int64, x.device),
            "slots": TensorSpec((experts + 1,), torch.int64, x.device),
            "sums": TensorSpec((experts,), wide, x.device),
            "squares": TensorSpec((1,), wide, x.device),
        }
        return {name: specs[name] for name in ("y", *self.extra_outputs)}

    def fwd(
        self,
        x: Tensor,
        *,
        selection_bias: Tensor | None = None,
        valid: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Outputs, Saved]:
        chosen = door.choose(Choosing(x, self.rule, selection_bias, valid, ids))
        outputs = {"y": chosen.weights, "top_k_index": chosen.ids, "counts": chosen.counts}
        sums = {"slots": chosen.slots, "sums": chosen.sums, "squares": chosen.squares}
        outputs |= {name: tensor for name, tensor in sums.items() if tensor is not None}
        return outputs, self.Saved(x, chosen.ids)

    def bwd(
        self, saved: Saved, dy: Tensor, *, sums: Tensor | None = None, squares: Tensor | None = None, **whole: Tensor
    ) -> Grads:
        problem = ChoosingBackward(saved.logits, self.rule, saved.ids, dy, sums, squares)
        return {"x": lambda: door.choose_backward(problem)}

    def extra_repr(self) -> str:
        return f"{self.rule.top_k}, {self.rule.scores}"
