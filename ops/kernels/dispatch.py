"""Dispatch: the one place that asks backends, obeys ``config(backend=..., strict=...)`` and records traces.

Backends register kernels for kinds of problems (``backends.py``). Backends that allow it by name and device are asked
in order. Kernels that run under any name are a fallback for every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, get_args

from ...fuser import RefusedError
from ...fuser.contract import tracing as trace
from ..values.switches import active_switches
from .problems.interface import AnyImplementation, AnyKind, Implementation, Implementations, Measured
from .problems.kinds import KINDS


class Choice(NamedTuple):
    """The kernels for a problem, and which backends refused it before, with their reasons.

    Attributes:
        excluded_by: the switch under which no kernels but a fallback may run; empty: they may.
    """

    kernels: AnyImplementation
    refused: tuple[tuple[str, str], ...] = ()
    excluded_by: str = ""

    @property
    def is_fallback(self) -> bool:
        """Whether no backend solves the problem by kernels of its own."""
        return self.kernels.backend is None

    @property
    def words(self) -> str:
        """The reason, without the names of the backends."""
        return self.excluded_by or "; ".join([why for _, why in self.refused])

    @property
    def reason(self) -> str:
        """The reason why no earlier kernels run; empty: these are the first."""
        return self.excluded_by or "; ".join([f"{backend} {why}" for backend, why in self.refused])


class Pool(NamedTuple):
    """The kernels for a kind of problem that a name and a device allow.

    Attributes:
        choices: in order, each with the backends that have none for the device.
        absent: these backends, and why.
        cache_key: that of the first kernels.
        taken: keys of problems that these take; as many as there are layers of different sizes.
    """

    choices: tuple[Choice, ...]
    absent: tuple[tuple[str, str], ...]
    cache_key: Callable[[object], Hashable | None] | None
    taken: set[Hashable]


class _Pools(dict[tuple[AnyKind, str, str], Pool]):
    """Made once for each kind of problem, name and type of device."""

    def __missing__(self, key: tuple[AnyKind, str, str]) -> Pool:
        kind, only, device = key
        asked = [kernels for kernels in kind.kernels if not kernels.by_name or kernels.backend == only]
        fitting = [
            kernels
            for kernels in asked
            if kernels.device in (None, device) or (kernels.interpreted and kernels.backend == only)
        ]
        there = {kernels.backend for kernels in fitting}
        absent = {
            kernels.backend: f"needs a {str(kernels.device).upper()} device, got {device}"
            for kernels in asked
            if kernels.backend not in (None, *there) and only in ("auto", kernels.backend)
        }
        allowed = [kernels for kernels in fitting if kernels.backend is None or only in ("auto", kernels.backend)]
        refused = tuple([(str(backend), why) for backend, why in absent.items()])
        excluded = not refused and all([kernels.backend is None for kernels in allowed])
        excluded_by = f"config(backend={only!r})" if only != "auto" and excluded else ""
        allowed += [_OF_DOOR] if kind.by_door else []
        choices = [Choice(k, refused, excluded_by if k.backend is None else "") for k in allowed]
        cache_key = choices[0].kernels.cache_key if choices else None
        self[key] = pool = Pool(tuple(choices), refused, cache_key, set())
        return pool


_pools = _Pools()
_kinds: dict[type, AnyKind] = {
    problem: kind for kind in KINDS for problem in get_args(kind.problems) or (kind.problems,)
}


def register(kernels: Implementations) -> None:
    """Adds the kernels of a backend, which are asked after those that are there."""
    for kind, those in kernels:
        kind.kernels.append(those)
    _pools.clear()


def allows(backend: str) -> bool:
    """Whether the switches let a backend of this name run."""
    return active_switches().backend in ("auto", backend)


def choose(problem: object, tracing: bool = False) -> Choice:
    """The first kernels that take the problem.

    Args:
        tracing: the tensors hold no data, or the reason is wanted, which an eager call does without.

    Raises:
        RefusedError: none take it; or a backend that is asked for by name does not; or, when strict, the first one on a
            CUDA device does not. Never for a kind that is optional.
    """
    kind, switches = _kinds[type(problem)], active_switches()
    tensor, only = kind.reads(problem), switches.backend
    on_cuda = tensor.is_cuda
    pool = _pools[kind, only, "cuda" if on_cuda else tensor.device.type]
    key = None if pool.cache_key is None or tracing else pool.cache_key(problem)
    if key is not None and key in pool.taken:
        return pool.choices[0]
    for choice in pool.choices:
        refusal = choice.kernels.refusal
        if refusal is None or refusal(problem) is None:
            break
    else:
        raise _no_kernels(problem, kind, pool)
    if choice is pool.choices[0] and not (pool.absent and only != "auto"):
        if key is not None:
            pool.taken.add(key)
        return choice
    if not tracing and only == "auto" and not (on_cuda and switches.strict):
        if choice.kernels.warn is not None:
            choice.kernels.warn(problem)
        return choice  # an eager call does not show the reason
    return _behind_others(problem, kind, pool, choice)


def refusal(problem: object) -> str | None:
    """Why no backend solves the problem by kernels of its own; None: one does.

    Raises:
        RefusedError: as in :func:`choose`.
    """
    choice = choose(problem, tracing=True)
    return choice.reason if choice.is_fallback else None


def run(problem: Measured) -> Choice:
    """Solves the problem by the chosen kernels, or records them in a trace; returns the choice.

    Raises:
        RefusedError: as of :func:`choose`.
    """
    tracing = trace.active()
    choice = choose(problem, tracing)
    if tracing:
        record(problem, choice)
    else:
        _solve(problem, choice)
    return choice


def solve(problem: Measured, choice: Choice) -> None:
    """Solves the problem by these kernels, or records them in a trace. Without data or rows it does nothing."""
    if trace.active():
        record(problem, choice)
    else:
        _solve(problem, choice)


def is_solved(problem: Measured) -> bool:
    """Solves the problem, or records it in a trace; False if the door's own operations must solve it.

    Raises:
        RefusedError: as of :func:`choose`.
    """
    choice = choose(problem, trace.active())
    if not choice.is_fallback:
        solve(problem, choice)
    return not choice.is_fallback


def _solve(problem: Measured, choice: Choice) -> None:
    kind = _kinds[type(problem)]
    if not kind.reads(problem).is_meta and (kind.is_empty is None or not kind.is_empty(problem)):
        choice.kernels.run(problem)


def record(problem: Measured, choice: Choice, reason: str | None = None) -> None:
    """Tells a trace of the kernels that solve a problem.

    Args:
        reason: why no faster ones do, if not that of the choice.
    """
    kind, kernels = _kinds[type(problem)], choice.kernels
    name = kernels.name if isinstance(kernels.name, str) else kernels.name(problem)
    if reason is None:  # on a CPU only the fallback is expected
        reason = choice.reason if kind.reads(problem).is_cuda or not choice.is_fallback else ""
    flops = 0 if kind.flops is None else kind.flops(problem)
    describe = kernels.configuration or kind.configuration
    words = "" if describe is None else describe(problem)
    trace.record(trace.KernelCall(name, reason, flops, problem.bytes, words))


def is_strict() -> bool:
    """Whether a kernel that falls back is an error."""
    return active_switches().strict


def _behind_others(problem: object, kind: AnyKind, pool: Pool, choice: Choice) -> Choice:
    """The choice with the reasons of those before it, which are asked again.

    Raises:
        RefusedError: see :func:`choose`.
    """
    before = [each.kernels for each in pool.choices[: pool.choices.index(choice)]]
    choice = choice._replace(refused=(*pool.absent, *_refusals(problem, before)))
    config, on_cuda = active_switches(), kind.reads(problem).is_cuda
    asked = config.backend != "auto"
    if choice.refused and not kind.optional and (asked or (config.strict and on_cuda)):
        raise RefusedError(_strict_error(kind, choice))
    return choice


def _refusals(problem: object, kernels: Iterable[AnyImplementation]) -> Iterable[tuple[str, str]]:
    for each in kernels:
        why = None if each.refusal is None else each.refusal(problem)
        if why is not None:
            yield str(each.backend), why


def _strict_error(kind: AnyKind, choice: Choice) -> str:
    if not choice.is_fallback:
        return f"strict: the {kind.subject} falls back to {choice.kernels.backend}, because {choice.reason}"
    (backend, why), *others = choice.refused
    more = "".join([f", and none of {name}, because it {words}" for name, words in others])
    return f"the {kind.subject} has no kernel of {backend}, because it {why}{more}"


def _no_kernels(problem: object, kind: AnyKind, pool: Pool) -> RefusedError:
    refused = (*pool.absent, *_refusals(problem, [choice.kernels for choice in pool.choices]))
    why = "; ".join([f"{backend} {words}" for backend, words in refused])
    return RefusedError(
        f"no backend for this {kind.subject}: {why or f'{active_switches().backend} has no kernel for it'}"
    )


def _left_to_door(problem: object) -> None:
    raise NotImplementedError(f"the door of {type(problem).__name__} solves it in a way of its own")


_OF_DOOR: AnyImplementation = Implementation(None, "torch", _left_to_door)
"""Stands for the way that a door has of its own."""
