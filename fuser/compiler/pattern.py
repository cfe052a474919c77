"""Patterns: a small graph of roles, matched with VF2, and the conditions that a match must meet."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

import networkx as nx
from networkx.algorithms.isomorphism import DiGraphMatcher

from ..contract.op import Op
from ..contract.overrides import patched_half
from ..contract.parametrized import foreseen
from ..contract.spec import TensorSpec
from .graph import OpGraph

OpTypes = type[Op] | tuple[type[Op], ...]


class Optional(NamedTuple):
    """A role that may be missing; see :func:`optional`."""

    types: OpTypes


def optional(types: OpTypes) -> Optional:
    """Marks a role of :meth:`Pattern.path` that may be missing; the fused op then gets None for it."""
    return Optional(types)


class Run(NamedTuple):
    """A run of ops that feed one another, of any length.

    Attributes:
        types: the types of the ops.
        op: the op built from them, as ``op(op0=..., op1=...)``, which has the role.
        fits: whether these ops, in this order, form such a run; may read types and attributes.
        shortest: the minimum length.
    """

    types: OpTypes
    op: Callable[..., Op]
    fits: Callable[[Sequence[Op]], bool] = lambda ops: True
    shortest: int = 2

    def lengths(self, graph: OpGraph) -> Iterator[int]:
        """The lengths of runs to try, from the shortest to the longest in the graph."""
        yield from range(self.shortest, 1 + max(map(len, maximal_runs(graph, self.types)), default=0))


class OneOrRun(NamedTuple):
    """A role for one op or a run; see :func:`one_or_run`."""

    types: OpTypes
    run: Run


def one_or_run(types: OpTypes, run: Run) -> OneOrRun:
    """Marks a role of :meth:`Pattern.path` for one op of ``types``, or for a run of ops in its place.

    The role is then ``run.op(op0=..., op1=...)``, whose parts a match calls ``role.op0``, ``role.op1``, ….
    """
    return OneOrRun(types, run)


def maximal_runs(graph: OpGraph, types: OpTypes) -> list[list[str]]:
    """The maximal sequences of nodes whose ops have these types and follow one another."""
    runs: list[list[str]] = [[]]
    for node in graph.entries():
        if isinstance(graph.op(node), types):
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


@dataclass(frozen=True)
class Match:
    """Ops by role: ``m.fc1`` is the op, or None for an optional role that is missing.

    It does not compute parametrized parameters; everything but their values can be read.
    """

    graph: OpGraph
    nodes: dict[str, str]
    roles: tuple[str, ...]
    runs: dict[str, Run] = field(default_factory=dict)

    def __getattr__(self, role: str) -> Any:
        if role not in self.roles:
            raise AttributeError(f"no role {role!r} in this match; it has {', '.join(self.roles)}")
        op = self.ops()[role]
        return op if op is None else foreseen(op)

    def ops(self) -> dict[str, Op | None]:
        """The arguments that the fused op is built with, by role."""
        return self._ops

    @cached_property
    def _ops(self) -> dict[str, Op | None]:
        return {role: self._op(role) for role in self.roles}

    def _op(self, role: str) -> Op | None:
        if role in self.nodes:
            return self.graph.op(self.nodes[role])
        members = {name.removeprefix(f"{role}."): node for name, node in self.nodes.items()}
        members = {name: node for name, node in members.items() if f"{role}.{name}" in self.nodes}
        return self.runs[role].op(**{name: self.graph.op(node) for name, node in members.items()}) if members else None

    def part(self, name: str) -> Op:
        """The op of a name in ``nodes``, a role or a member of a run, with predicted forms of computed parameters."""
        op = self.graph.op(self.nodes[name])
        assert op is not None
        return foreseen(op)

    def reads(self, role: str, port: str) -> bool:
        """Whether the op of a role reads anything at ``port``."""
        return role in self.nodes and port in self.graph.sources(self.nodes[role])

    def source(self, role: str, port: str) -> tuple[str, str] | None:
        """The (node, output) that the op of a role reads at ``port``, None if nothing."""
        return self.graph.sources(self.nodes[role]).get(port) if role in self.nodes else None

    def info(self, role: str, port: str) -> TensorSpec | None:
        """The spec, without its shape, of the call's argument at ``port`` of a role; None if there is none."""
        source = self.source(role, port)
        return None if source is None else self.graph.nx.nodes[source[0]].get("spec")


Condition = tuple[str, Callable[[Match], bool]]


@dataclass(frozen=True)
class Pattern:
    """A shape (roles joined by ports) and conditions, each with the reason that ``explain`` gives if it fails."""

    roles: dict[str, OpTypes]
    edges: tuple[tuple[str, str, str], ...] = ()
    optional_edges: tuple[tuple[str, str, str], ...] = ()
    optional_roles: frozenset[str] = frozenset()
    chain: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    runs: dict[str, Run] = field(default_factory=dict)

    @classmethod
    def path(cls, **roles: OpTypes | Optional | OneOrRun) -> Pattern:
        """Ops that feed one another, in order: ``Pattern.path(fc1=GroupedLinear, act=GLU, scale=optional(Scale))``.

        Raises:
            TypeError: a role that is neither a subclass of :class:`Op` nor a tuple of them.
            ValueError: no role.
        """
        types = {role: t.types if isinstance(t, Optional | OneOrRun) else t for role, t in roles.items()}
        if not roles:
            raise ValueError("Pattern.path: give at least one role, such as linear=Linear")
        for role, classes in types.items():
            several = classes if isinstance(classes, tuple) else (classes,)
            if not all(isinstance(t, type) and issubclass(t, Op) for t in several):
                raise TypeError(f"Pattern.path: {role} must be a class of Op, or a tuple of such, got {classes!r}")
        missing_ok = frozenset(role for role, t in roles.items() if isinstance(t, Optional))
        runs = {role: t.run for role, t in roles.items() if isinstance(t, OneOrRun)}
        return cls(types, optional_roles=missing_ok, chain=tuple(roles), runs=runs)

    @classmethod
    def of_run(cls, run: Run) -> Pattern:
        """A run of ops with roles ``op0``, ``op1``, …; if it is refused, shorter ones are tried."""
        return RunPattern({"op": run.types}, runs={"": run})

    def edge(self, source: str, reader: str, port: str) -> Pattern:
        """Requires that ``reader`` reads an output of ``source`` at ``port``; both are roles of a :meth:`path`."""
        self._check(source, reader)
        return replace(self, edges=(*self.edges, (source, reader, port)))

    def may_read(self, source: str, reader: str, *ports: str) -> Pattern:
        """Allows that ``reader`` reads outputs of ``source`` at these ports; both are roles of a :meth:`path`."""
        self._check(source, reader)
        edges = [(source, reader, port) for port in ports]
        return replace(self, optional_edges=(*self.optional_edges, *edges))

    def shares(self, port: str, *roles: str) -> Pattern:
        """Requires that the roles read one and the same tensor at ``port``."""
        self._check(*roles)
        reason = f"{' and '.join(roles)} read different {port}"
        return self.where(reason, lambda m: len({m.source(role, port) for role in roles if role in m.nodes}) == 1)

    def absent(self, port: str, role: str) -> Pattern:
        """Requires that the call does not give the keyword ``port`` to the op of a role."""
        self._check(role)
        return self.where(f"{role} has {port!r}", lambda m: not m.reads(role, port))

    def where(self, reason: str, holds: Callable[[Match], bool]) -> Pattern:
        """Adds a condition; ``explain`` prints ``reason`` if it does not hold.

        A predicate may read the ops, their parameters' dtypes, devices and ``requires_grad``, and what :class:`Match`
        offers. It must not read shapes or values of inputs.

        Raises:
            TypeError: ``reason`` is not a string, or ``holds`` is not callable.
        """
        if not isinstance(reason, str) or not callable(holds):
            raise TypeError(f"Pattern.where: expected a reason and a predicate, got {reason!r} and {holds!r}")
        return replace(self, conditions=(*self.conditions, (reason, holds)))

    def matches(self, graph: OpGraph) -> list[Match]:
        """Every match of the shape, before conditions: in execution order, the longest first."""
        position = graph.nx.nodes
        matches: dict[frozenset[str], Match] = {}  # of the same ops one: that with the most roles
        for shape in self._shapes(graph):
            for match in self._matches_of(shape, graph):
                if all(run.fits(_members(match, role)) for role, run in self.runs.items() if role not in match.nodes):
                    matches.setdefault(frozenset(match.nodes.values()), match)
        return sorted(
            matches.values(), key=lambda m: (min(position[n]["position"] for n in m.nodes.values()), -len(m.nodes))
        )

    def shorter(self, match: Match) -> Iterator[Match]:
        """Matches of fewer ops, to try after the match was refused."""
        yield from ()

    def refusal(self, match: Match) -> str | None:
        """The reason of the first condition that does not hold."""
        overrides = next(filter(None, (self._override(match, role) for role in match.nodes)), None)
        return overrides or next((reason for reason, holds in self.conditions if not holds(match)), None)

    def _override(self, match: Match, role: str) -> str | None:
        """The reason if an op's ``fwd`` or ``bwd`` is not that of the class in the pattern, or None."""
        op, types = match.part(role), self._types_of(role)
        method = patched_half(op)
        if method:
            return f"{role} has a {method} of its own, set on the object"
        base = next(t for t in (types if isinstance(types, tuple) else (types,)) if isinstance(op, t))
        same = inspect.isabstract(base) or (type(op).fwd is base.fwd and type(op).bwd is base.bwd)
        return None if same else f"{role} is a {type(op).__name__}, which overrides {base.__name__}"

    def _check(self, *roles: str) -> None:
        for role in roles:
            if role not in self.roles:
                raise ValueError(f"no role {role!r} in this pattern; it has {', '.join(self.roles)}")

    def _types_of(self, role: str) -> OpTypes:
        """The types of a role, or of a member of a run."""
        return self.roles[role] if role in self.roles else self.runs[role.partition(".")[0]].types

    def _matches_of(self, shape: nx.DiGraph[str], graph: OpGraph) -> Iterator[Match]:
        ops = self._without_optional_edges(graph.ops_only())
        matcher = DiGraphMatcher(
            *(ops, shape),
            node_match=lambda node, role: isinstance(node["entry"].op, role["types"]),
            edge_match=lambda edge, wanted: edge["ports"].keys() == wanted["ports"],
        )
        for mapping in matcher.subgraph_isomorphisms_iter():
            name_of = {role: name for name, role in mapping.items()}
            yield Match(graph, {role: name_of[role] for role in shape.nodes}, tuple(self.roles), self.runs)

    def _without_optional_edges(self, graph: nx.DiGraph[str]) -> nx.DiGraph[str]:
        """The graph without optional edges, which do not decide whether a shape fits."""
        if not self.optional_edges:
            return graph
        kept: nx.DiGraph[str] = nx.DiGraph()
        kept.add_nodes_from(graph.nodes.items())
        for source, reader, edge in graph.edges(data=True):
            ports = {p: output for p, output in edge["ports"].items() if not self._may(graph, source, reader, p)}
            if ports:
                kept.add_edge(source, reader, ports=ports)
        return kept

    def _may(self, graph: nx.DiGraph[str], source: str, reader: str, port: str) -> bool:
        return any(
            port == optional and self._has_role(graph, source, giver) and self._has_role(graph, reader, taker)
            for giver, taker, optional in self.optional_edges
        )

    def _has_role(self, graph: nx.DiGraph[str], node: str, role: str) -> bool:
        return isinstance(graph.nodes[node]["entry"].op, self.roles[role])

    def _shapes(self, graph: OpGraph) -> Iterator[nx.DiGraph[str]]:
        """The shape with every choice of optional roles, then with every length of runs, the shortest first."""
        lengths = [None, *sorted({length for run in self.runs.values() for length in run.lengths(graph)})]
        choices = [(True, False) if role in self.optional_roles else (True,) for role in self.roles]
        for length, chosen in product(lengths, product(*choices)):
            if any(chosen):
                yield self._shape({role for role, there in zip(self.roles, chosen, strict=True) if there}, length)

    def _shape(self, there: set[str], length: int | None) -> nx.DiGraph[str]:
        """The shape with these roles, and with runs of this length in roles that allow them; None: with single ops."""
        shape: nx.DiGraph[str] = nx.DiGraph()
        chain = [name for role in self.chain if role in there for name in self._names(role, length)]
        shape.add_nodes_from((name, {"types": self._types_of(name)}) for name in chain)
        joins = [(a, b, "x") for a, b in pairwise(chain)]
        for source, reader, port in [*joins, *(e for e in self.edges if {e[0], e[1]} <= there)]:
            if not shape.has_edge(source, reader):
                shape.add_edge(source, reader, ports=set())
            shape.edges[source, reader]["ports"].add(port)
        return shape

    def _names(self, role: str, length: int | None) -> list[str]:
        return [role] if length is None or role not in self.runs else [f"{role}.op{i}" for i in range(length)]


class RunPattern(Pattern):
    """A pattern that is one run of ops; see :meth:`Pattern.of_run`."""

    def matches(self, graph: OpGraph) -> list[Match]:
        """The maximal runs."""
        runs = [self._match(graph, nodes) for nodes in maximal_runs(graph, self._run.types)]
        return [match for match in runs if match is not None]

    def shorter(self, match: Match) -> Iterator[Match]:
        """All parts of a run, the longest first."""
        nodes = list(match.nodes.values())
        for length in range(len(nodes) - 1, self._run.shortest - 1, -1):
            for start in range(len(nodes) - length + 1):
                part = self._match(match.graph, nodes[start : start + length])
                if part is not None:
                    yield part

    @property
    def _run(self) -> Run:
        return self.runs[""]

    def _match(self, graph: OpGraph, nodes: Sequence[str]) -> Match | None:
        """The match of these nodes, or None if they do not form such a run."""
        by_role = {f"op{i}": node for i, node in enumerate(nodes)}
        ops = [op for node in nodes if (op := graph.op(node)) is not None]
        return Match(graph, by_role, tuple(by_role)) if len(ops) >= self._run.shortest and self._run.fits(ops) else None

    def _types_of(self, role: str) -> OpTypes:
        return self._run.types


def _members(match: Match, role: str) -> list[Op]:
    """The ops of a run."""
    return [match.part(name) for name in match.nodes if name.startswith(f"{role}.")]
