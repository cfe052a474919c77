"""The common part of fusions from tokens to tokens: their arguments, and the edges of their patterns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...fuser import FusedOp, Pattern
from ..routed.call import RoutedCall
from ..routed.moe import ROUTING


class RoutedOp(FusedOp):
    """A fused op from tokens to tokens."""

    def fwd(
        self,
        x: Tensor,
        *,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Any]:
        return self.run(RoutedCall(x, top_k_index, top_k_weights, needs_grad, autocast_dtype))

    @abstractmethod
    def run(self, call: RoutedCall) -> tuple[Tensor, Any]:
        """The output and the saved state."""


def routed(path: Pattern, scales: Iterable[str], to_combine: Iterable[str] = ROUTING) -> Pattern:
    """A path from ``dispatch`` to ``combine`` whose ``fc1``, ``fc2`` and ``scales`` read the outputs of the dispatch.

    ``act`` may read them as well.
    """
    for role in ("fc1", "fc2"):
        path = path.edge("dispatch", role, "split_sizes")
    for role in scales:
        path = path.edge("dispatch", role, "scales")
    for name in to_combine:
        path = path.edge("dispatch", "combine", name)
    return path.may_read("dispatch", "act", "scales", "split_sizes")


def with_as_many_groups(path: Pattern) -> Pattern:
    """The path, where both linears have the experts of the dispatch."""
    return path.where(
        "dispatch, fc1 and fc2 have different numbers of experts",
        lambda match: bool(match.dispatch.num_experts == match.fc1.num_groups == match.fc2.num_groups),
    )
