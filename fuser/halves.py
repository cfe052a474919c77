"""Runs one half of an op: its ``fwd`` or ``bwd`` as it is, or again what an earlier one of the same form did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import settings
from .op import Gradient, Grads, Op, Targets
from .replay import Recorder, Replay, aligned, form_of, stream_of
from .saved import pack, unpack

_SEEN, _REFUSED = "seen once", "refused"
_MANY_FORMS = 256


class Replays:
    """By form, what is known of a half: that it was seen once, how to do it again, or that it cannot be.

    Attributes:
        ops: the op and its parts, whose attributes decide as well.
    """

    def __init__(self, ops: tuple[Op, ...]) -> None:
        self.ops = ops
        self.known: dict[tuple[Any, ...], Any] = {}

    def form(self, given: Sequence[Tensor], also: Any) -> tuple[Any, ...]:
        """All that a half may depend on besides the contents of what it is given."""
        return form_of(given, stream_of(given[0]), also, *[op.edits for op in self.ops])

    def note(self, form: tuple[Any, ...], what: Any) -> None:
        """Keeps it; where there are many forms, those of an earlier time go."""
        if len(self.known) >= _MANY_FORMS:
            self.known.clear()
        self.known[form] = what


class Job(NamedTuple):
    """An op under way: what it is given besides tensors of autograd.

    Attributes:
        names: of the tensors whose gradients autograd may want.
        replays: of the forward; None where it is not replayed.
    """

    op: Op
    keywords: Mapping[str, Any]
    autocast_dtype: torch.dtype | None
    names: tuple[str, ...]
    replays: Replays | None


class Call(NamedTuple):
    """What a backward needs besides the tensors that were kept.

    Attributes:
        order: of the kept tensors, as ``rest`` wants them; None: as they are.
        replays: of the backward.
    """

    op: Op
    names: tuple[str, ...]
    wanted: frozenset[str]
    rest: Any
    config: settings.Config
    order: tuple[int, ...] | None = None
    replays: Replays | None = None

    def saved(self, tensors: Sequence[Tensor]) -> Any:
        """What ``fwd`` returned for ``bwd``."""
        return unpack(self.rest, tensors if self.order is None else [tensors[i] for i in self.order])


class Ran(NamedTuple):
    """What a forward leaves."""

    outputs: tuple[Tensor, ...]
    kept: Sequence[Tensor]
    call: Call


class _Again(NamedTuple):
    """A forward's replay; ``kept`` are places of what it keeps, each once."""

    replay: Replay
    kept: tuple[int, ...]
    call: Call


def forward(job: Job, x: Tensor, wanted: frozenset[str]) -> Ran:
    """Runs the forward."""
    replays = job.replays
    if replays is None:
        return _forward(job, x, wanted)
    given = [x, *job.keywords.values(), *job.op.memory()]
    addresses = list(map(Tensor.data_ptr, given))
    form = replays.form(given, wanted)
    known = replays.known.get(form)
    if not aligned(addresses) or known is _REFUSED:
        return _forward(job, x, wanted)
    if known is None:
        replays.note(form, _SEEN)
        return _forward(job, x, wanted)
    if known is _SEEN:
        ran, again = _recorded_forward(job, x, wanted, given, replays)
        replays.note(form, again or _REFUSED)
        return ran
    tensors = known.replay.run(given, addresses)
    return Ran(tuple([tensors[i] for i in known.replay.made]), [tensors[i] for i in known.kept], known.call)


def gradients(call: Call, tensors: Sequence[Tensor], douts: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Runs the backward; the gradients in the order of the names."""
    replays = call.replays
    if replays is None:
        return _gradients(call, tensors, douts)
    targets = call.op.targets(call.wanted)
    given = [*tensors, *douts] if targets is None else [*tensors, *douts, *targets.tensors]
    addresses = list(map(Tensor.data_ptr, given))
    form = replays.form(given, None if targets is None else targets.facts)
    known = replays.known.get(form)
    if not aligned(addresses) or known is _REFUSED:
        return _gradients(call, tensors, douts)
    if known is None:
        with Recorder(given) as recorder:
            grads = _gradients(call, tensors, douts)
        replays.note(form, recorder.replay(grads) or _REFUSED)
        return grads
    made = known.run(given, addresses)
    if targets is not None:
        targets.written()
    return [None if i is None else made[i] for i in known.made]


def call_fwd(
    op: Op, x: Tensor, keywords: Mapping[str, Any], needs_grad: frozenset[str], autocast_dtype: torch.dtype | None
) -> tuple[tuple[Tensor, ...], Any]:
    """``op.fwd`` with the reserved names that it declares: the outputs in order, and ``Saved``."""
    given = with_reserved(op, "fwd", keywords, needs_grad, autocast_dtype)
    if autocast_dtype is None:
        returned = op.fwd(x, **given)
    else:  # the op casts what it wants cast; torch functions inside must not cast again
        with torch.autocast(x.device.type, enabled=False):
            returned = op.fwd(x, **given)
    if not isinstance(returned, tuple):
        raise RuntimeError(f"{type(op).__name__}.fwd must return (y, Saved), it returned a {type(returned).__name__}")
    result, saved = returned
    return (result,) if isinstance(result, Tensor) else _in_order(op, result), saved


def call_bwd(op: Op, saved: Any, douts: tuple[Tensor, ...], needs_grad: frozenset[str]) -> Grads:
    """``op.bwd`` with the gradients of its outputs, and the reserved names that it declares."""
    extras = dict(zip(op.extra_outputs, douts[1:], strict=True)) if op.extra_outputs else {}
    grads = op.bwd(saved, douts[0], **with_reserved(op, "bwd", extras, needs_grad, None))
    if not needs_grad <= grads.keys():
        missing = sorted(needs_grad - grads.keys())
        raise RuntimeError(f"{type(op).__name__}.bwd returned no gradient for {missing}; it returned {sorted(grads)}")
    return grads


def evaluate(gradient: Gradient) -> Tensor | None:
    """Calls a thunk."""
    return gradient() if callable(gradient) and not isinstance(gradient, Tensor) else gradient


def with_reserved(
    op: Op, half: str, keywords: Mapping[str, Any], needs_grad: frozenset[str], autocast_dtype: torch.dtype | None
) -> Mapping[str, Any]:
    """The keywords, and those reserved names that ``op.fwd``, ``bwd`` or ``check`` declares."""
    declared = op.reserved[half]
    if not declared:
        return keywords
    given = dict(keywords)
    if "needs_grad" in declared:
        given["needs_grad"] = needs_grad
    if "autocast_dtype" in declared:
        given["autocast_dtype"] = autocast_dtype
    return given


def _forward(job: Job, x: Tensor, wanted: frozenset[str]) -> Ran:
    outputs, saved = call_fwd(job.op, x, job.keywords, wanted, job.autocast_dtype)
    kept, rest = pack(saved)
    return Ran(outputs, kept, Call(job.op, job.names, wanted, rest, settings.current()))


def _recorded_forward(
    job: Job, x: Tensor, wanted: frozenset[str], given: Sequence[Tensor], replays: Replays
) -> tuple[Ran, _Again | None]:
    with Recorder(given) as recorder:
        ran = _forward(job, x, wanted)
    replay = recorder.replay(ran.outputs, ran.kept if wanted else ())
    if replay is None:
        return ran, None
    once = list(dict.fromkeys(replay.kept))  # the split sizes, say, that two ops keep
    order = tuple([once.index(place) for place in replay.kept])
    return ran, _Again(replay, tuple(once), ran.call._replace(order=order, replays=Replays(replays.ops)))


def _gradients(call: Call, tensors: Sequence[Tensor], douts: tuple[Tensor, ...]) -> list[Tensor | None]:
    grads = call_bwd(call.op, call.saved(tensors), douts, call.wanted)
    for name in grads:
        if name not in call.names:
            raise RuntimeError(
                f"{type(call.op).__name__}.bwd returned gradients for {sorted(grads.keys() - set(call.names))}, "
                f"which it does not read; it returned {sorted(grads)}"
            )
    return [evaluate(grads[name]) if name in call.wanted else None for name in call.names]


def _in_order(op: Op, outputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    if outputs.keys() != {"y", *op.extra_outputs}:
        expected = ", ".join(("y", *op.extra_outputs))
        raise RuntimeError(f"{type(op).__name__}.fwd returned outputs {', '.join(outputs)}; expected {expected}")
    return tuple(outputs[name] for name in ("y", *op.extra_outputs))


__all__ = ["Call", "Job", "Ran", "Replays", "Targets", "call_bwd", "call_fwd", "evaluate", "forward", "gradients"]
