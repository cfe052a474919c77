"""Fusions: which pattern becomes which fused op. A plugin is one ``@register_fusion(pattern)`` on a class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TypeVar

from ..composite import FusedOp
from ..contract.config import Config
from ..contract.errors import did_you_mean
from . import legality
from .graph import OpGraph
from .pattern import Match, Pattern

T = TypeVar("T", bound=type[FusedOp])
ENTRY_POINTS = "fusible.fusions"


@dataclass(frozen=True)
class Fusion:
    """Where ``pattern`` matches, ``op(**roles)`` replaces the matched ops."""

    name: str
    pattern: Pattern
    op: type[FusedOp]
    priority: int


KeywordSources = dict[str, tuple[str, str]]  # keyword of the fused op -> (node, output) that it reads


@dataclass(frozen=True)
class Decision:
    """The outcome of one match. ``refusal``: None if it was taken; ``benign``: whether the refusal can be ignored."""

    fusion: Fusion
    match: Match
    refusal: str | None
    benign: bool = False
    fused: FusedOp | None = None
    reads: KeywordSources = field(default_factory=dict)

    @property
    def taken(self) -> bool:
        return self.refusal is None

    @property
    def reason(self) -> str:
        return self.refusal or "every condition holds"


class Registry:
    """Fusions in the order in which they are tried: by priority, then by registration."""

    def __init__(self) -> None:
        self._fusions: tuple[Fusion, ...] = ()
        self._plugins_loaded = False
        self.version = 0

    def __iter__(self) -> Iterator[Fusion]:
        self._load_plugins()
        return iter(self._fusions)

    def add(self, fusion: Fusion) -> None:
        """Adds a fusion; it counts from the next call of any container on.

        Raises:
            ValueError: there is already a fusion of that name.
        """
        if any(f.name == fusion.name for f in self._fusions):
            raise ValueError(
                f"a fusion named {fusion.name!r} is registered already; give another name, or unregister it"
            )
        self._set((*self._fusions, fusion))

    def remove(self, name: str) -> None:
        """Removes the fusion of that name.

        Raises:
            KeyError: there is no such fusion.
        """
        if all(f.name != name for f in self._fusions):
            names = ", ".join(f.name for f in self._fusions) or "none"
            raise KeyError(f"no fusion is named {name!r}; there are {names}")
        self._set(tuple(f for f in self._fusions if f.name != name))

    def decide(self, graph: OpGraph, config: Config) -> Iterator[Decision]:
        """Tries every fusion, in order. The first to match an op takes it."""
        names = {fusion.name for fusion in self}
        if not config.disable_fusions <= names:
            unknown = sorted(config.disable_fusions - names)
            there, hint = ", ".join(sorted(names)), did_you_mean(unknown[0], sorted(names))
            warnings.warn(
                f"config(disable_fusions): no fusion {', '.join(unknown)}; there are {there}{hint}", stacklevel=2
            )
        taken: dict[str, str] = {}
        for fusion in self:
            for match in fusion.pattern.matches(graph):
                for decision in _decisions(fusion, match, config, taken):
                    if decision.taken:
                        taken |= dict.fromkeys(decision.match.nodes.values(), fusion.name)
                    yield decision

    def _set(self, fusions: tuple[Fusion, ...]) -> None:
        self._fusions = tuple(sorted(fusions, key=lambda f: -f.priority))
        self.version += 1

    def _load_plugins(self) -> None:
        if not self._plugins_loaded:
            self._plugins_loaded = True
            for plugin in entry_points(group=ENTRY_POINTS):
                try:
                    plugin.load()
                except Exception as error:  # a broken plugin must not take the model down, nor go unseen
                    warnings.warn(
                        f"fusible: plugin {plugin.name!r} ({plugin.value}) failed to load: {error!r}", stacklevel=2
                    )


registry = Registry()


def register_fusion(pattern: Pattern, priority: int = 0, name: str | None = None) -> Callable[[T], T]:
    """Class decorator: where ``pattern`` matches, the decorated :class:`FusedOp` replaces the ops.

    Args:
        pattern: the pattern to match; its roles are the class's constructor arguments.
        priority: higher is tried first; fusions of equal priority are tried in the order of registration.
        name: the name in ``explain`` and ``config(disable_fusions=...)``; by default that of the class.

    Raises:
        TypeError: ``pattern`` is not a :class:`Pattern`, or the class not a :class:`FusedOp`.
        ValueError: there is already a fusion of that name.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"register_fusion: expected a Pattern, got {pattern!r}; write @register_fusion(Pattern.path(...))"
        )

    def add(op: T) -> T:
        if not (isinstance(op, type) and issubclass(op, FusedOp)):
            raise TypeError(f"register_fusion: expected a subclass of FusedOp, got {op!r}")
        registry.add(Fusion(name or op.__name__, pattern, op, priority))
        return op

    return add


def unregister(name: str | type[FusedOp]) -> None:
    """Removes a fusion by name, or by the class if it carries that class's name."""
    if not isinstance(name, (str, type)):
        raise TypeError(f"unregister: expected the name of a fusion, or its class, got {name!r}")
    registry.remove(name if isinstance(name, str) else name.__name__)


def _decisions(fusion: Fusion, match: Match, config: Config, taken: dict[str, str]) -> Iterator[Decision]:
    """The decision on a match and, if it is refused, the decisions on shorter matches that are taken instead."""
    decision = _decide(fusion, match, config, taken)
    yield decision
    for part in () if decision.taken else fusion.pattern.shorter(match):
        decision = _decide(fusion, part, config, taken)
        if decision.taken:
            yield decision


def _decide(fusion: Fusion, match: Match, config: Config, taken: dict[str, str]) -> Decision:
    if fusion.name in config.disable_fusions:
        return Decision(fusion, match, "disabled by config(disable_fusions=...)", benign=True)
    others = {taken[node] for node in match.nodes.values() if node in taken}
    if others:
        return Decision(fusion, match, f"{min(others)} has taken one of the ops", benign=True)
    try:
        refusal = fusion.pattern.refusal(match)
        if refusal:
            return Decision(fusion, match, refusal)
        fused = fusion.op(**match.ops())
    except Exception as error:
        error.add_note(f"while fusion {fusion.name} was tried; config(disable_fusions={{{fusion.name!r}}}) skips it")
        raise
    reads, misfit = _bind_keywords(match, fused)
    return Decision(fusion, match, legality.refusal(match, fused) or misfit, False, fused, reads)


def _bind_keywords(match: Match, fused: FusedOp) -> tuple[KeywordSources, str | None]:
    """The source of each keyword of the fused op, and the reason why its keywords do not fit the call, or None."""
    reads: KeywordSources = {}
    owners: dict[str, str] = {}
    for role, port, source in _outer_reads(match):
        name = fused.takes(role, port)
        if name is None:
            return reads, f"{role} has {port!r}, which {type(fused).__name__} does not take"
        if reads.setdefault(name, source) != source:
            return reads, f"{owners[name]} and {role} read different {port}"
        owners[name] = role
    unread = [name for name, keyword in fused.keywords.items() if keyword.required and name not in reads]
    if unread:
        return reads, f"{type(fused).__name__} needs {unread[0]!r}, which no op that it stands for was given"
    return reads, None


def _outer_reads(match: Match) -> Iterator[tuple[str, str, tuple[str, str]]]:
    """The (role, keyword, source) of everything that the matched ops read from outside besides ``x``."""
    inside = set(match.nodes.values())
    for role, node in match.nodes.items():
        for port, source in match.graph.sources(node).items():
            if port != "x" and source[0] not in inside:
                yield role, port, source
