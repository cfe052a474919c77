"""Runs one half of an op: its ``fwd`` or ``bwd`` as it is, or again what an earlier one of the same form did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import Config, active_config
from ..op import Delivery, Gradient, Grads, Op, Targets
from ..replay.capture import Recorder
from ..replay.captured import Record, replay_of
from ..replay.program import Forms, Replay, aligned, stream_of
from .buffers import overlap
from .residuals import Source, pack, unpack

_REFUSED = "refused"


class Call(NamedTuple):
    """What a backward needs besides the tensors that were kept.

    Attributes:
        order: of the kept tensors, as ``rest`` wants them; None: as they are.
        ops: the op and its parts, whose attributes decide as well.
        forms: of what a backward is given: its replay, or that there is none; None where none is looked for.
        sources: of the tensors that autograd saves one by one, behind the others, of which there are ``number``.
    """

    op: Op
    names: tuple[str, ...]
    wanted: frozenset[str]
    rest: Any
    config: Config
    order: tuple[int, ...] | None = None
    ops: tuple[Op, ...] = ()
    forms: Forms | None = None
    sources: tuple[Source, ...] = ()
    number: int = 0

    def saved(self, tensors: Sequence[Tensor], lent: Sequence[Tensor], joined: Sequence[Any]) -> Any:
        """What ``fwd`` returned for ``bwd``."""
        return unpack(self.rest, tensors if self.order is None else [tensors[i] for i in self.order], lent, joined)

    def apart(self) -> list[Tensor]:
        """Those that autograd saves one by one, as they are now."""
        tensors: list[Tensor] = []
        for source in self.sources:
            tensors += source.tensors()
        return tensors

    def joined(self, tensors: Sequence[Tensor]) -> list[Tensor | Sequence[Tensor]]:
        """What ``bwd`` is given for those that were saved one by one."""
        values, at = list[Tensor | Sequence[Tensor]](), self.number
        for source in self.sources:
            values += (source.joined(tensors[at : at + source.number]),)
            at += source.number
        return values


class Ran(NamedTuple):
    """What a forward leaves: ``kept`` for its backward, each once, and ``apart`` one by one; ``lent`` are buffers."""

    outputs: tuple[Tensor, ...]
    kept: Sequence[Tensor]
    apart: Sequence[Tensor]
    lent: Sequence[Tensor]
    call: Call


class Fresh(NamedTuple):
    """A forward by the code of its op.

    Attributes:
        names: of the tensors whose gradients autograd may want.
        x_is_inner: whether the call has made x, rather than been given it.
    """

    op: Op
    keywords: Mapping[str, Any]
    autocast_dtype: torch.dtype | None
    names: tuple[str, ...]
    x_is_inner: bool = False

    def run(self, x: Tensor, wanted: frozenset[str]) -> Ran:
        outputs, saved = call_fwd(self.op, x, self.keywords, wanted, self.autocast_dtype, self.x_is_inner)
        kept, lent, apart, rest = pack(saved)
        once, order = _each_once(kept)
        op = self.op if self.op._outline is None else self.op._outline
        config = active_config()
        if not apart:
            return Ran(outputs, once, (), lent, Call(op, self.names, wanted, rest, config, order))
        sources, one_by_one = [], list[Tensor]()
        for each in apart:
            sources.append(each.source)
            one_by_one += each.tensors
        call = Call(op, self.names, wanted, rest, config, order, (), None, tuple(sources), len(once))
        return Ran(outputs, once, one_by_one, lent, call)

    def given(self, x: Tensor) -> list[Tensor]:
        """All tensors that it may read."""
        return [x, *self.keywords.values(), *self.op.memory()]

    def recorded(self, x: Tensor, wanted: frozenset[str], calls: list[Call]) -> tuple[Ran, Again | None]:
        """Runs, and how to run again; ``calls`` are those of other lengths, whose backwards are recorded together."""
        with Recorder(self.given(x)) as recorder:
            ran = self.run(x, wanted)
        rows = x.shape[0] if x.dim() else 0
        record = recorder.record(rows, ran.outputs, (*ran.kept, *ran.lent) if wanted else ())
        if record is None or (replay := replay_of([record])) is None:
            return ran, None
        call = ran.call._replace(ops=tuple([op for op in self.op.modules() if isinstance(op, Op)]))
        call = next((known for known in calls if known._replace(forms=None) == call), call)
        if call.forms is None:
            call = call._replace(forms=Forms())
            calls.append(call)
        count = len(ran.kept)
        return ran._replace(call=call), Again(replay, replay.kept[:count], replay.kept[count:], call, record)


class Again(NamedTuple):
    """A forward that does again what one of the same form did; ``kept`` are places of what it keeps, each once."""

    replay: Replay
    kept: tuple[int, ...]
    lent: tuple[int, ...]
    call: Call
    record: Record

    def run(self, given: list[Tensor], addresses: list[int], rows: int, stream: int) -> Ran:
        tensors = self.replay.run(given, addresses, rows, stream)
        outputs: Any = [tensors[i] for i in self.replay.made]  # type: ignore[index]
        kept, lent = [tensors[i] for i in self.kept], [tensors[i] for i in self.lent]
        return Ran(tuple(outputs), kept, self.call.apart() if self.call.sources else (), lent, self.call)

    @classmethod
    def joined(cls, several: Sequence[Again]) -> Again | None:
        """For any number of rows, from forwards of different ones; None where they do not fit together."""
        first, replay = several[0], replay_of([again.record for again in several])
        for again in several:
            if again.call is not first.call or (again.kept, again.lent) != (first.kept, first.lent):
                return None
        return replay and first._replace(replay=replay)


def gradients(
    call: Call, tensors: Sequence[Tensor], lent: Sequence[Tensor], douts: tuple[Tensor, ...], node: Any
) -> list[Tensor | None]:
    """Runs the backward of an autograd node; the gradients in the order of the names."""
    joined: list[Tensor | Sequence[Tensor]] = []
    if call.sources:
        tensors, joined = tensors[: call.number], call.joined(tensors)
    targets: tuple[Targets, ...] = ()
    wanted = call.wanted
    deliveries = call.op.deliveries(wanted)
    if deliveries:
        asked = [each for each in deliveries if _is_asked(node, call.names.index(each.name))]
        if len(asked) < len(deliveries):
            wanted = wanted - {each.name for each in deliveries if each not in asked}
        if lent or call.forms is not None:
            targets = tuple([each.targets() for each in asked])
            _refuse_overlaps(call.op, asked, targets, lent)
    if call.forms is None:
        return _gradients(call, tensors, lent, joined, douts, wanted)
    given = [*tensors, *lent, *douts]
    if targets:
        written = [tensor for each in targets for tensor in each.tensors]
        given += dict(zip(map(id, written), written, strict=True)).values()  # each once
    for value in joined:
        given += (value,) if type(value) is Tensor else value
    addresses = list(map(Tensor.data_ptr, given))
    facts = tuple([each.facts for each in targets]) if targets else ()
    key = len(given), facts, *[op.edits for op in call.ops]
    rows = douts[0].shape[0] if douts[0].dim() else 0
    entry = call.forms.entry(key, given, rows)
    known = entry.what
    if known is _REFUSED or not aligned(addresses):
        return _gradients(call, tensors, lent, joined, douts, wanted)
    if known is None:
        with Recorder(given) as recorder:
            grads = _gradients(call, tensors, lent, joined, douts, wanted)
        _note(entry, recorder.record(rows, grads), rows)
        return grads
    made = known.run(given, addresses, rows, stream_of(given[0]))
    for each in targets:
        if each.done is not None:
            each.done()
    return [None if i is None else made[i] for i in known.made]


def _is_asked(node: Any, position: int) -> bool:
    """Whether the backward that runs wants the gradient of a node's input: not if it is for others, as ``grad`` is.

    What the node says of its inputs was settled in the forward, so the engine is asked whether it will go on from here.
    """
    producer = node.next_functions[position][0]
    try:
        return producer is None or bool(torch._C._will_engine_execute_node(producer))
    except RuntimeError:  # a leaf whose gradient ``grad`` returns, or no engine, which could leave something out
        return True


def _refuse_overlaps(op: Op, asked: Sequence[Delivery], targets: Sequence[Targets], lent: Sequence[Tensor]) -> None:
    """Raises where a buffer of the backward shares memory with what it writes besides."""
    for buffer in lent:
        for delivery, each in zip(asked, targets, strict=True):
            if any(overlap(buffer, tensor) for tensor in each.written):
                raise RuntimeError(
                    f"{type(op).__name__}: a buffer for a gradient overlaps in memory what that of {delivery.name} is "
                    "added to; give a buffer of its own"
                )


def _note(entry: Any, record: Record | None, rows: int) -> None:
    """What is known of the form of a backward from now on, and of those that differ in their rows."""
    replay = None if record is None else replay_of([record])
    entry.what = replay or _REFUSED
    entry.family.add(rows, replay and record, replay_of)


def call_fwd(
    op: Op,
    x: Tensor,
    keywords: Mapping[str, Any],
    needs_grad: frozenset[str],
    autocast_dtype: torch.dtype | None,
    x_is_inner: bool = False,
) -> tuple[tuple[Tensor, ...], Any]:
    """``op.fwd`` with the reserved names that it declares: the outputs in order, and ``Saved``."""
    given, changes = with_reserved(op, "fwd", keywords, needs_grad, autocast_dtype, x_is_inner), op.changes
    if autocast_dtype is None:
        returned = op.fwd(x, **given)
    else:  # the op casts what it wants cast; torch functions inside must not cast again
        with torch.autocast(x.device.type, enabled=False):
            returned = op.fwd(x, **given)
    if op.changes != changes:
        op.forget_changes(changes)
    if not isinstance(returned, tuple):
        raise RuntimeError(f"{type(op).__name__}.fwd must return (y, Saved), it returned a {type(returned).__name__}")
    result, saved = returned
    return (result,) if isinstance(result, Tensor) else _in_order(op, result), saved


def call_bwd(op: Op, saved: Any, douts: tuple[Tensor, ...], needs_grad: frozenset[str]) -> Grads:
    """``op.bwd`` with the gradients of its outputs, and the reserved names that it declares."""
    extras = dict(zip(op.extra_outputs, douts[1:], strict=True)) if op.extra_outputs else {}
    changes = op.changes
    grads = op.bwd(saved, douts[0], **with_reserved(op, "bwd", extras, needs_grad, None))
    if op.changes != changes:
        op.forget_changes(changes)
    if not needs_grad <= grads.keys():
        missing = sorted(needs_grad - grads.keys())
        raise RuntimeError(f"{type(op).__name__}.bwd returned no gradient for {missing}; it returned {sorted(grads)}")
    return grads


def evaluate(gradient: Gradient) -> Tensor | None:
    """Calls a thunk."""
    return gradient() if callable(gradient) and not isinstance(gradient, Tensor) else gradient


def with_reserved(
    op: Op,
    half: str,
    keywords: Mapping[str, Any],
    needs_grad: frozenset[str],
    autocast_dtype: torch.dtype | None,
    x_is_inner: bool = False,
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
    if "x_is_inner" in declared:
        given["x_is_inner"] = x_is_inner
    return given


def _gradients(
    call: Call,
    tensors: Sequence[Tensor],
    lent: Sequence[Tensor],
    joined: Sequence[Any],
    douts: tuple[Tensor, ...],
    wanted: frozenset[str],
) -> list[Tensor | None]:
    grads = call_bwd(call.op, call.saved(tensors, lent, joined), douts, wanted)
    for name in grads:
        if name not in call.names:
            raise RuntimeError(
                f"{type(call.op).__name__}.bwd returned gradients for {sorted(grads.keys() - set(call.names))}, "
                f"which it does not read; it returned {sorted(grads)}"
            )
    return [evaluate(grads[name]) if name in wanted else None for name in call.names]


def _each_once(kept: list[Tensor]) -> tuple[list[Tensor], tuple[int, ...] | None]:
    """The tensors without repetitions, such as split sizes that two ops keep, and the order that brings them back.

    A call keeps as many tensors each time, replayed or not: activation checkpointing counts them.
    """
    ids = list(map(id, kept))
    once = dict(zip(ids, kept, strict=True))
    if [*once] == ids:
        return kept, None
    places = dict(zip(once, range(len(once)), strict=True))
    return [*once.values()], tuple(map(places.__getitem__, ids))


def _in_order(op: Op, outputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    given = outputs.keys() if isinstance(outputs, Mapping) else {f"a {type(outputs).__name__}"}
    if given != {"y", *op.extra_outputs}:
        expected = ", ".join(("y", *op.extra_outputs))
        raise RuntimeError(f"{type(op).__name__}.fwd returned outputs {', '.join(given)}; expected {expected}")
    return tuple(outputs[name] for name in ("y", *op.extra_outputs))
