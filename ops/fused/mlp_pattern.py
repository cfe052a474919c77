"""The pattern of experts: GroupedLinear -> activation -> [Scale] -> GroupedLinear -> [Scale]."""

from __future__ import annotations

from typing import Any

from ...fuser import Match, Pattern, optional
from ..basic.scale import Scale
from ..formats.recipe import Recipe
from ..grouped.grouped_linear import GroupedLinear
from ..quantized.linear import followed_by
from .activation_role import BETWEEN_LINEARS, with_activation


def _buffer_holds_y(match: Match) -> bool:
    """A buffer of the second linear holds what that linear gives, before a scale that follows it."""
    return match.out_scale is None or not match.reads("fc2", "output")


def _leaves_amaxes(match: Match) -> bool:
    """Whether no scales come from earlier steps, whose amaxes fusion would change."""
    recipe: Recipe | None = followed_by(match.fc1)
    return match.out_scale is None or recipe is None or recipe.steps is None


ROLES: dict[str, Any] = {
    "fc1": GroupedLinear,
    "act": BETWEEN_LINEARS,
    "scale": optional(Scale),
    "fc2": GroupedLinear,
    "out_scale": optional(Scale),
}


def with_one_recipe(pattern: Pattern) -> Pattern:
    """Adds two conditions: both linears use one recipe, and fusing does not change which tensors delayed scales see."""
    return pattern.where(
        "fc1 and fc2 have different recipes", lambda m: followed_by(m.fc1) == followed_by(m.fc2)
    ).where("the scale after fc2 would change the amaxes that delayed scales come from", _leaves_amaxes)


EXPERTS = with_one_recipe(
    with_activation(Pattern.path(**ROLES))
    .shares("split_sizes", "fc1", "fc2")
    .absent("output", "fc1")
    .absent("grad_input", "fc2")
    .where("fc1 and fc2 have different numbers of groups", lambda m: m.fc1.num_groups == m.fc2.num_groups)
).where("the scale after fc2 would change what its output buffer holds", _buffer_holds_y)
