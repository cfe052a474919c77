"""A choice of experts by logits, as the door hands it to a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

from torch import Tensor

from .gemm import Counted

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True)
class ChoiceRule:
    """The rule by which tokens choose experts.

    Experts are compared by keys in float32 (float64 for float64 logits): the logits, or with a bias or groups the
    scores plus the bias. The higher key goes first, NaN before all; among equal keys the lower expert. Logits and equal
    scores have one order everywhere. Scores are rounded, so backends may differ in the order of keys closer than a few
    units of the last place.

    Attributes:
        top_k: how many experts a token goes to.
        scores: one of :data:`SCORES`.
        normalize: the weights of a token add up to ``scale``.
        groups: of neighbouring experts; a token chooses from ``keep`` of them. 1: there are none.
        best: how many of a group's keys are added up to choose groups.
        tallied: whether sums for losses are wanted.
    """

    top_k: int
    scores: str
    normalize: bool
    scale: float
    groups: int = 1
    keep: int = 1
    best: int = 1
    tallied: bool = False


class Chosen(NamedTuple):
    """The results of a choice. The last three are sums for losses, None if they are not wanted.

    They leave out a token that is not valid, and one whose highest logit is NaN or infinite.

    Attributes:
        weights: [T, k], float32 at least.
        ids: int64 [T, k], the best expert first; -1 for a token that is not valid.
        counts: int64 [E], the slots of each expert.
        slots: int64 [E + 1]: the same of the tokens in the sums; last, how many tokens those are.
        sums: [E]: of each expert's probability.
        squares: [1]: of the squared logsumexp of the logits.
    """

    weights: Tensor
    ids: Tensor
    counts: Tensor
    slots: Tensor | None
    sums: Tensor | None
    squares: Tensor | None


@final
@dataclass(slots=True)
class Choosing(Counted):
    """T tokens choose experts.

    Attributes:
        logits: [T, E].
        bias: [E], added to the scores that are compared.
        valid: bool [T]: the others go to no expert.
        fixed_ids: int64 [T, k]: the experts, not to be chosen; a row of -1 alone is missing, and chosen.
        out: where kernels of a backend write; PyTorch's operations allocate their own.
    """

    PASS: ClassVar[str] = "choose"
    logits: Tensor
    rule: ChoiceRule
    bias: Tensor | None
    valid: Tensor | None
    fixed_ids: Tensor | None
    out: Chosen | None = None


@final
@dataclass(slots=True)
class ChoosingBackward(Counted):
    """The gradient of the logits.

    Attributes:
        ids: as :class:`Chosen` has them.
        d_weights: [T, k]; None: 0.
        d_sums: [E]; None: 0.
        d_squares: [1]; None: 0.
        out: as of :class:`Choosing`.
    """

    PASS: ClassVar[str] = "choose backward"
    logits: Tensor
    rule: ChoiceRule
    ids: Tensor
    d_weights: Tensor | None
    d_sums: Tensor | None
    d_squares: Tensor | None
    out: Tensor | None = None
