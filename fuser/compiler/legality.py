"""Legality of a fusion: the conditions that every fusion must respect, whatever its pattern."""

from __future__ import annotations

import networkx as nx

from ..composite import FusedOp
from ..contract.overrides import is_hooked, overrides_forward
from .graph import OpGraph
from .pattern import Match


def refusal(match: Match, fused: FusedOp) -> str | None:
    """The reason why the matched ops cannot be replaced by ``fused``, or None."""
    graph, nodes = match.graph, set(match.nodes.values())
    several = "the ops read more than one x from outside" if len(_outside(graph, nodes)) != 1 else None
    return _hooks(match) or several or _leaks(graph, nodes, fused) or _cycle(graph, nodes)


def last(match: Match) -> str:
    """The op whose ``y`` becomes the fused op's ``y``: no other matched op reads it."""
    nodes = set(match.nodes.values())
    return next(n for n in nodes if not any(r in nodes and output == "y" for r, _, output in match.graph.readers(n)))


def source_of_x(match: Match) -> tuple[str, str]:
    """The (node, output) that the fused op reads as ``x``."""
    return next(iter(_outside(match.graph, set(match.nodes.values()))))


def _outside(graph: OpGraph, nodes: set[str]) -> set[tuple[str, str]]:
    return {source for n in nodes if (source := graph.sources(n)["x"])[0] not in nodes}


def _hooks(match: Match) -> str | None:
    for name, node in match.nodes.items():
        op = match.part(name)
        user_code = "a forward of its own" if overrides_forward(op) else "hooks" if is_hooked(op) else None
        if user_code:
            runs = "runs" if user_code[0] == "a" else "run"
            return f"op {node} has {user_code}, which only {runs} where it is called itself"
    return None


def _leaks(graph: OpGraph, nodes: set[str], fused: FusedOp) -> str | None:
    """The reason if a value made inside is read outside, other than the fused op's outputs; or None."""
    ends = 0
    for node in nodes:
        readers = graph.readers(node)
        ends += all(r not in nodes for r, port, output in readers if output == "y")
        op = graph.op(node)
        for name in ("y", *(op.extra_outputs if op else ())):
            inside = [r in nodes for r, _, output in readers if output == name]
            if name == "y" and any(inside) and not all(inside):
                return f"another op reads the output of op {node}"
            if name == "y" or name in fused.extra_outputs or op is None:
                continue
            if not all(inside) or graph.returns(node, name, bool(inside)):
                return f"the extra output {name!r} of op {node} is wanted outside"
    return None if ends == 1 else "the ops have more than one output"


def _cycle(graph: OpGraph, nodes: set[str]) -> str | None:
    after = {d for n in nodes for d in nx.descendants(graph.nx, n)} - nodes
    before = {a for n in nodes for a in nx.ancestors(graph.nx, n)} - nodes
    return f"op {min(after & before)} must run between the ops" if after & before else None
