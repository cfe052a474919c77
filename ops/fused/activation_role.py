"""The role ``act`` of a pattern: a built-in activation, or a function that a user has written."""

from __future__ import annotations

from torch import Tensor

from ...fuser import Gradient, Match, Pattern
from ..activation_spec import ActivationSpec
from ..glu import Activated
from ..pointwise import Pointwise

ACTIVATION = (Activated, Pointwise)
_PREFIX, _SIZES = "act.", "split_sizes"


def with_activation(pattern: Pattern) -> Pattern:
    """A pattern with the role ``act``, and maybe ``scale`` and ``out_scale``, where kernels have such an activation.

    A function may read one number of the row, which then is the scale before the second linear. A scale after that
    linear joins it, if the function is linear in it.
    """
    return _with_rows(
        pattern.where("act has operations that kernels do not know", _is_known).where(
            "act reads a number for each column", lambda match: not _has_columns(match)
        )
    )


def with_activation_of_groups(pattern: Pattern) -> Pattern:
    """As :func:`with_activation`, of a pattern with the role ``fc1``: a function may read numbers of its columns."""
    return _with_rows(
        pattern.where("act has operations that kernels do not know", _is_known)
        .where("act reads a number for each column, the same for all groups", _reads_columns_of_groups)
        .where("act and fc1 read different split_sizes", _shares_groups)
    )


def _with_rows(pattern: Pattern) -> Pattern:
    return (
        pattern.where("act reads more than one number of a row", _reads_one_number)
        .where("act reads a number of the row, and so does the scale after it", _scales_once)
        .where("act is not linear in its number of the row, and a scale follows fc2", _is_linear)
    )


def spec_of(act: Activated | Pointwise) -> ActivationSpec:
    """What the activation of a match is."""
    spec = act.spec
    assert spec is not None
    return spec


def vectors_of(act: Activated | Pointwise) -> Tensor | None:
    """[K, E, F]: the numbers of each group's columns that the activation of a match reads; None: it reads none."""
    return act.vectors if isinstance(act, Pointwise) and act.has_columns else None


def reads_a_row(act: Activated | Pointwise) -> bool:
    """Whether the activation of a match reads a number of the row."""
    return isinstance(act, Pointwise) and act.reads_a_row


def wants_vectors(needs_grad: frozenset[str]) -> bool:
    """Whether a gradient of the activation's numbers of columns is wanted, by the names of a fused op."""
    return any(name.startswith(_PREFIX) for name in needs_grad)


def vector_grads(
    act: Activated | Pointwise, dvectors: Tensor | None, needs_grad: frozenset[str]
) -> dict[str, Gradient]:
    """The wanted gradients of the activation's numbers of columns, by the names of a fused op."""
    if dvectors is None or not isinstance(act, Pointwise):
        return {}
    wanted = [name.removeprefix(_PREFIX) for name in needs_grad if name.startswith(_PREFIX)]
    return {f"{_PREFIX}{name}": gradient for name, gradient in act.column_grads(dvectors, wanted).items()}


def keyword_of(role: str, keyword: str) -> str | None:
    """What a fused op calls the number of the row that its activation reads; None for what is no such number."""
    return "scales" if role == "act" and keyword != _SIZES else None


def _is_known(match: Match) -> bool:
    return not isinstance(match.act, Pointwise) or match.act.program is not None


def _has_columns(match: Match) -> bool:
    return isinstance(match.act, Pointwise) and match.act.has_columns


def _reads_columns_of_groups(match: Match) -> bool:
    return not _has_columns(match) or match.act.has_columns_of_groups


def _shares_groups(match: Match) -> bool:
    return not _has_columns(match) or match.source("act", _SIZES) == match.source("fc1", _SIZES)


def _reads_one_number(match: Match) -> bool:
    return not isinstance(match.act, Pointwise) or match.act.spec is not None


def _scales_once(match: Match) -> bool:
    return not (reads_a_row(match.act) and _has(match, "scale"))


def _is_linear(match: Match) -> bool:
    spec = match.act.spec
    return not _has(match, "out_scale") or (spec is not None and bool(spec.is_linear_in_scale))


def _has(match: Match, role: str) -> bool:
    return role in match.nodes
