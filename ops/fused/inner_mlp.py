"""The common part of fusions that have a :class:`GroupedMLP` between a dispatch and a combine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ...fuser import Op, Pattern
from ..basic.glu import Activated
from ..basic.scale import Scale
from ..grouped.grouped_linear import GroupedLinear
from ..grouped.pointwise import Pointwise
from ..routed.moe import ROUTING
from .activation_role import reads_a_row, with_activation
from .grouped_mlp import GroupedMLP
from .mlp_pattern import ROLES, with_one_recipe
from .pointwise_chain import PointwiseChain
from .routed import RoutedOp, routed

SCALES = {"scale": "scales", "out_scale": "out_scale_scales"}  # by role: the keyword of the GroupedMLP


def tokens_to_tokens(dispatch: type[Op], combine: type[Op], to_combine: Iterable[str] = ROUTING) -> Pattern:
    """A pattern of a GroupedMLP's ops between two other ops; the second reads the extra outputs ``to_combine``."""
    path = Pattern.path(dispatch=dispatch, **ROLES, combine=combine)
    pattern = with_activation(routed(path, SCALES, to_combine))
    for buffer in ("output", "grad_input"):
        pattern = pattern.absent(buffer, "fc1").absent(buffer, "fc2")
    return with_one_recipe(pattern)


class InnerMLP(RoutedOp):
    """A fused op that runs a :class:`GroupedMLP` on the rows of its experts."""

    fc1: GroupedLinear
    act: Activated | Pointwise | PointwiseChain
    scale: Scale | None
    fc2: GroupedLinear
    out_scale: Scale | None
    untraced = frozenset({"_experts"})

    def __init__(self, *args: Any, **roles: Any) -> None:
        super().__init__(*args, **roles)
        self._experts: list[GroupedMLP] = []  # not a child of this op: its parameters are those of the roles

    @property
    def experts(self) -> GroupedMLP:
        """The experts between dispatch and combine."""
        if not self._experts:
            inside = {role: op for role, op in self.parts.items() if role not in ("dispatch", "combine")}
            self._experts.append(GroupedMLP(**{**dict.fromkeys(SCALES), **inside}))
        return self._experts[0]

    @property
    def scaled_by(self) -> tuple[str, ...]:
        """The keywords of the experts that are the routing weights."""
        before = self.scale is not None or reads_a_row(self.act)
        there = {"scale": before, "out_scale": self.out_scale is not None}
        return tuple([keyword for role, keyword in SCALES.items() if there[role]])


@lru_cache(maxsize=4096)
def needs_of_experts(needs_grad: frozenset[str], scaled_by: tuple[str, ...]) -> frozenset[str]:
    """The gradients that the experts must give, by names of :class:`GroupedMLP`."""
    weights = frozenset({"top_k_weights"})
    return needs_grad - weights | (frozenset(scaled_by) if weights <= needs_grad else frozenset())
