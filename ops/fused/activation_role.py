"""The role ``act`` of a pattern: a built-in activation, a user's function, or a chain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from ...fuser import Gradient, Match, Op, Pattern, Run, one_or_run
from ..basic.bias import Bias
from ..basic.glu import Activated
from ..basic.link import Link
from ..grouped import link_rows
from ..grouped.pointwise import Pointwise
from ..kernels import Operands
from ..values.activation_spec import ActivationSpec
from .pointwise_chain import FUNCTIONS, LINKS, PointwiseChain, has_function, number_of_gates

PREFIX = "act."
"""The prefix of the names of the activation's parts."""
_SIZES = "split_sizes"


def is_chain(ops: Sequence[Op]) -> bool:
    """Whether ops may be one program."""
    return number_of_gates(ops) < 2


def is_activation(ops: Sequence[Op]) -> bool:
    """Whether a chain is one with an activation."""
    return has_function(ops) and is_chain(ops)


ACTIVATION_OR_CHAIN = one_or_run(FUNCTIONS, Run(LINKS, PointwiseChain, is_activation))
"""After a linear. A chain that only adds and multiplies keeps no pre-activation, see :class:`GroupedLinearChain`."""
BETWEEN_LINEARS = one_or_run(FUNCTIONS, Run(LINKS, PointwiseChain, is_chain))


def with_activation(pattern: Pattern) -> Pattern:
    """Restricts a pattern with the role ``act``, and maybe ``scale`` and ``out_scale``, to activations that kernels
    have.

    It follows the role ``fc1``. A function may read one number of the row, which then is the scale before the second
    linear. A scale after that linear joins it, if the function is linear in it.
    """
    return (
        pattern.where("act has operations that kernels do not know", _is_supported)
        .where("act and fc1 read different split_sizes", shares_groups)
        .where("act adds a matrix, which the epilogue of a backward does not read", _adds_no_matrix)
        .where("act reads more than one number of a row", _reads_one_number)
        .where("act reads a number of the row, and so does the scale after it", _scales_once)
        .where("act is not linear in its number of the row, and a scale follows fc2", _is_linear)
    )


def spec_of(act: Activated | Pointwise | PointwiseChain) -> ActivationSpec:
    """The activation of a match as an :class:`ActivationSpec`."""
    spec = act.spec
    assert spec is not None
    return spec


def vectors_of(act: Activated | Pointwise | PointwiseChain) -> tuple[Tensor, ...] | None:
    """The numbers of columns that the activation of a match reads, as kernels take them; None: it reads none."""
    return None if _is_built_in(type(act)) else link_rows.vectors_of(_link_of(act), dict(act.inputs()))


def reads_a_row(act: Activated | Pointwise | PointwiseChain) -> bool:
    """Whether the activation of a match reads a number of the row."""
    return not isinstance(act, Activated) and bool(_link_of(act).rows)


def reads_numbers(act: Activated | Pointwise | PointwiseChain) -> bool:
    """Whether the activation of a match reads numbers of the row, or of columns."""
    return not _is_built_in(type(act)) and (reads_a_row(act) or vectors_of(act) is not None)


@lru_cache(maxsize=4096)
def wants_vectors(needs_grad: frozenset[str]) -> bool:
    """Whether a gradient of the activation's numbers of columns is wanted, by the names of a fused op."""
    return any(name.startswith(PREFIX) for name in needs_grad)


def vector_grads(
    act: Activated | Pointwise | PointwiseChain, dvectors: Operands, needs_grad: frozenset[str]
) -> dict[str, Gradient]:
    """The wanted gradients of the activation's numbers of columns, by the names of a fused op."""
    if dvectors is None or isinstance(act, Activated):
        return {}
    wanted = [name.removeprefix(PREFIX) for name in needs_grad if name.startswith(PREFIX)]
    grads = link_rows.column_grads(_link_of(act), dvectors, dict(act.inputs()), wanted)
    return {f"{PREFIX}{name}": gradient for name, gradient in grads.items()}


def keyword_of(role: str, keyword: str) -> str | None:
    """The fused op's keyword for the number of the row that its activation, or a part of it, reads; else None."""
    return "scales" if role.partition(".")[0] == "act" and keyword != _SIZES else None


@cache
def _is_built_in(kind: type) -> bool:
    return issubclass(kind, Activated)


def _link_of(act: Any) -> Link:
    link: Link | None = act.link
    assert link is not None
    return link


def _is_supported(match: Match) -> bool:
    return isinstance(match.act, Activated) or match.act.program is not None


def _reading_columns(match: Match) -> dict[str, Link]:
    """The ops of the activation that read numbers of columns, by their names in the match."""
    names = [name for name in match.nodes if name.partition(".")[0] == "act"]
    parts = {name: part for name in names if isinstance(part := match.part(name), Pointwise | Bias)}
    return {name: link for name, part in parts.items() if (link := _link_of(part)).columns}


def shares_groups(match: Match) -> bool:
    """Whether the numbers of columns are those of the groups of fc1."""
    of_groups = [name for name, link in _reading_columns(match).items() if link.groups is not None]
    return {match.source(name, _SIZES) for name in of_groups} <= {match.source("fc1", _SIZES)}


def _adds_no_matrix(match: Match) -> bool:
    return isinstance(match.act, Activated) or not _link_of(match.act).matrices


def _reads_one_number(match: Match) -> bool:
    return match.act.spec is not None


def _scales_once(match: Match) -> bool:
    return not (reads_a_row(match.act) and _has(match, "scale"))


def _is_linear(match: Match) -> bool:
    spec = match.act.spec
    return not _has(match, "out_scale") or (spec is not None and bool(spec.is_linear_in_scale))


def _has(match: Match, role: str) -> bool:
    return role in match.nodes
