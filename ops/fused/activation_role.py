"""The role ``act`` of a pattern: a built-in activation, a function that a user has written, or a chain with one."""

from __future__ import annotations

from collections.abc import Sequence

from ...fuser import Match, Op, Pattern, Run, one_or_run
from ..activation_spec import ActivationSpec
from ..glu import Activated
from ..pointwise import Pointwise
from ..scale import ConstantScale, Scale
from .pointwise_chain import PointwiseChain, has_function, number_of_gates

ACTIVATION = (Activated, Pointwise)


def _is_chain(ops: Sequence[Op]) -> bool:
    return has_function(ops) and number_of_gates(ops) < 2


ACTIVATION_OR_CHAIN = one_or_run(
    ACTIVATION, Run((Activated, Pointwise, Scale, ConstantScale), PointwiseChain, _is_chain)
)
"""In an epilogue. Of ops that read numbers of columns none is, so a :class:`Bias` ends the chain."""


def with_activation(pattern: Pattern) -> Pattern:
    """A pattern with the role ``act``, and maybe ``scale`` and ``out_scale``, where kernels have such an activation.

    A function may read one number of the row, which then is the scale before the second linear. A scale after that
    linear joins it, if the function is linear in it.
    """
    return (
        pattern.where("act has operations that kernels do not know", _is_known)
        .where("act reads a number for each column", _reads_no_column)
        .where("act reads more than one number of a row", _reads_one_number)
        .where("act reads a number of the row, and so does the scale after it", _scales_once)
        .where("act is not linear in its number of the row, and a scale follows fc2", _is_linear)
    )


def spec_of(act: Activated | Pointwise | PointwiseChain) -> ActivationSpec:
    """What the activation of a match is."""
    spec = act.spec
    assert spec is not None
    return spec


def keyword_of(role: str) -> str | None:
    """What a fused op calls the number of the row that its activation, or a part of it, reads; None for other roles."""
    return "scales" if role.partition(".")[0] == "act" else None


def _is_known(match: Match) -> bool:
    return isinstance(match.act, Activated) or match.act.program is not None


def _reads_no_column(match: Match) -> bool:
    return isinstance(match.act, Activated) or not (match.act.program and match.act.program.columns)


def _reads_one_number(match: Match) -> bool:
    return match.act.spec is not None


def _scales_once(match: Match) -> bool:
    return not (match.act.keywords and _has(match, "scale"))


def _is_linear(match: Match) -> bool:
    spec = match.act.spec
    return not _has(match, "out_scale") or (spec is not None and bool(spec.is_linear_in_scale))


def _has(match: Match, role: str) -> bool:
    return role in match.nodes
