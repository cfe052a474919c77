"""Near misses: fusions whose pattern would fit but for one op.

A refused fusion has a reason. A pattern that does not fit has none, as most patterns are unrelated to most containers.
A near miss is therefore reported only if all required roles but one fit, and at least two do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from .graph import OpGraph
from .pattern import OpTypes, Pattern
from .registry import Decision, Fusion

_FEWEST_ROLES = 3  # required ones: of two, one that fits says nothing


class NearMiss(NamedTuple):
    """A fusion, the ops that it would take, and the obstacle."""

    fusion: str
    nodes: tuple[str, ...]
    reason: str


def near_misses(graph: OpGraph, fusions: Iterable[Fusion], decisions: Sequence[Decision]) -> list[NearMiss]:
    """The near misses of the graph. A fusion already decided on some of these ops is not a near miss."""
    misses: list[NearMiss] = []
    for fusion in fusions:
        decided = {node for d in decisions if d.fusion is fusion for node in d.match.nodes.values()}
        misses += [miss for miss in _of(fusion, graph) if decided.isdisjoint(miss.nodes)]
    return [miss for miss in misses if not any(set(miss.nodes) < set(other.nodes) for other in misses)]


def covered(decision: Decision, decisions: Sequence[Decision]) -> bool:
    """Whether a taken fusion contains all ops of the decision, and more."""
    nodes = set(decision.match.nodes.values())
    return any(d.taken and nodes < set(d.match.nodes.values()) for d in decisions)


def _of(fusion: Fusion, graph: OpGraph) -> Iterator[NearMiss]:
    pattern, order = fusion.pattern, graph.entries()
    if len(pattern.chain) - len(pattern.optional_roles) < _FEWEST_ROLES:
        return
    seen: set[tuple[str, ...]] = set()
    for roles in _chains(pattern):
        for length, reason_of in ((len(roles), _replaced), (len(roles) + 1, _between)):
            for start in range(len(order) - length + 1):
                nodes = tuple(order[start : start + length])
                reason = reason_of(pattern, roles, nodes, graph)
                if reason is not None and nodes not in seen:
                    seen.add(nodes)
                    yield NearMiss(fusion.name, nodes, reason)


def _chains(pattern: Pattern) -> Iterator[tuple[str, ...]]:
    """The roles of a path, with every choice of optional ones; the longest first."""
    choices = [(True, False) if role in pattern.optional_roles else (True,) for role in pattern.chain]
    for chosen in product(*choices):
        yield tuple([role for role, there in zip(pattern.chain, chosen, strict=True) if there])


def _replaced(pattern: Pattern, roles: Sequence[str], nodes: Sequence[str], graph: OpGraph) -> str | None:
    """The reason if another op is in the place of one required role, else None."""
    wrong = [(role, node) for role, node in zip(roles, nodes, strict=True) if not _fits(pattern, role, node, graph)]
    if len(wrong) != 1 or wrong[0][0] in pattern.optional_roles or _has_a_role(pattern, wrong[0][1], graph):
        return None
    role, node = wrong[0]
    return f"would fit, but {graph.entry(node)} is not of type {_names(pattern.roles[role])}, as {role} must be"


def _between(pattern: Pattern, roles: Sequence[str], nodes: Sequence[str], graph: OpGraph) -> str | None:
    """The reason if one extra op is between two roles, else None."""
    for before, _ in pairwise(range(len(nodes) - 1)):
        node, rest = nodes[before + 1], (*nodes[: before + 1], *nodes[before + 2 :])
        fits = all(_fits(pattern, role, other, graph) for role, other in zip(roles, rest, strict=True))
        if fits and not _has_a_role(pattern, node, graph):
            return f"would fit, but for {graph.entry(node)} in between"
    return None


def _fits(pattern: Pattern, role: str, node: str, graph: OpGraph) -> bool:
    return isinstance(graph.op(node), pattern.roles[role])


def _has_a_role(pattern: Pattern, node: str, graph: OpGraph) -> bool:
    """Whether the op has another place in the pattern: then the ops are another sequence, not a near miss."""
    return any(_fits(pattern, role, node, graph) for role in pattern.roles)


def _names(types: OpTypes) -> str:
    return " or ".join(t.__name__ for t in (types if isinstance(types, tuple) else (types,)))
