"""Captures the forward and the backward of one op, and replays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from ..op import Op, Targets
from ..runtime.autograd import apply
from ..runtime.call import BackwardContext, EagerStep, ForwardResult, refuse_overlaps
from .capture import Recorder
from .captured import Record, replay_of
from .program import Forms, Replay, aligned, stream_of

REFUSED = "refused"


@dataclass(slots=True)
class CapturedContext(BackwardContext):
    """The context of a captured forward. Its backward is captured once for each form, then replayed.

    Attributes:
        ops: the op and its parts. A capture holds only until one of their attributes is assigned.
        forms: of the tensors that backwards were given: the replay of each, or that there is none.
    """

    ops: tuple[Op, ...] = ()
    forms: Forms = field(default_factory=Forms, compare=False)

    @classmethod
    def of(cls, context: BackwardContext, ops: tuple[Op, ...]) -> CapturedContext:
        return cls(**{each.name: getattr(context, each.name) for each in fields(context)}, ops=ops)

    def gradients(
        self, tensors: Sequence[Tensor], lent: Sequence[Tensor], douts: tuple[Tensor, ...], node: Any
    ) -> list[Tensor | None]:
        """As of the base class, by a replay where one has been captured for such tensors."""
        joined: list[Tensor | Sequence[Tensor]] = []
        if self.sources:
            tensors, joined = tensors[: self.number], self.joined(tensors)
        targets: tuple[Targets, ...] = ()
        wanted = self.wanted
        deliveries = self.op.deliveries(wanted)
        if deliveries:
            requested, wanted = self.requested(deliveries, node)
            targets = tuple([each.targets() for each in requested])
            refuse_overlaps(self.op, requested, targets, lent)
        given = [*tensors, *lent, *douts]
        if targets:
            written = [tensor for each in targets for tensor in each.tensors]
            given += dict(zip(map(id, written), written, strict=True)).values()  # each once
        for value in joined:
            given += (value,) if type(value) is Tensor else value
        addresses = list(map(Tensor.data_ptr, given))
        facts = tuple([each.facts for each in targets]) if targets else ()
        key = len(given), facts, *[op.edits for op in self.ops]
        rows = douts[0].shape[0] if douts[0].dim() else 0
        entry = self.forms.entry(key, given, rows)
        known = entry.what
        if known is REFUSED or not aligned(addresses):
            return self.run(tensors, lent, joined, douts, wanted)
        if known is None:
            with Recorder(given) as recorder:
                grads = self.run(tensors, lent, joined, douts, wanted)
            _file(entry, recorder.record(rows, grads), rows)
            return grads
        made = known.run(given, addresses, rows, stream_of(given[0]))
        for each in targets:
            if each.done is not None:
                each.done()
        return [None if i is None else made[i] for i in known.made]


class CapturedStep(NamedTuple):
    """A forward that replays an earlier one of the same form.

    Attributes:
        kept, lent: the positions, in the tensors of the replay, of what it keeps for its backward.
        record: what it was made from; those of several lengths make a replay for any number of rows.
    """

    replay: Replay
    kept: tuple[int, ...]
    lent: tuple[int, ...]
    context: CapturedContext
    record: Record

    def run(
        self, given: list[Tensor], addresses: list[int], rows: int, stream: int, inputs: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Replays the forward; ``inputs`` are those of autograd, empty where it does not record."""
        if inputs:
            return apply(lambda flags: self.forward(given, addresses, rows, stream), *inputs)
        return self.forward(given, addresses, rows, stream).outputs

    def forward(self, given: list[Tensor], addresses: list[int], rows: int, stream: int) -> ForwardResult:
        """The outputs, and what the backward needs."""
        tensors = self.replay.run(given, addresses, rows, stream)
        outputs: Any = [tensors[i] for i in self.replay.made]  # type: ignore[index]
        kept, lent = [tensors[i] for i in self.kept], [tensors[i] for i in self.lent]
        apart = self.context.apart() if self.context.sources else ()
        return ForwardResult(tuple(outputs), kept, apart, lent, self.context)

    @classmethod
    def joined(cls, several: Sequence[CapturedStep]) -> CapturedStep | None:
        """For any number of rows, from forwards of different ones; None where they do not fit together."""
        first, replay = several[0], replay_of([step.record for step in several])
        for step in several:
            if step.context is not first.context or (step.kept, step.lent) != (first.kept, first.lent):
                return None
        return replay and first._replace(replay=replay)


def capture(
    step: EagerStep, x: Tensor, wanted: frozenset[str], contexts: list[CapturedContext]
) -> tuple[ForwardResult, CapturedStep | None]:
    """Runs a forward and captures it; None where it cannot be replayed.

    Args:
        contexts: those of captures with other numbers of rows, whose backwards are captured together. A context that
            equals none of them is added.
    """
    with Recorder(step.inputs(x)) as recorder:
        result = step.run(x, wanted)
    rows = x.shape[0] if x.dim() else 0
    record = recorder.record(rows, result.outputs, (*result.kept, *result.lent) if wanted else ())
    if record is None or (replay := replay_of([record])) is None:
        return result, None
    ops = tuple([op for op in step.op.modules() if isinstance(op, Op)])
    new = CapturedContext.of(result.context, ops)
    context = next((context for context in contexts if context == new), new)
    if context is new:
        contexts.append(new)
    count = len(result.kept)
    captured = CapturedStep(replay, replay.kept[:count], replay.kept[count:], context, record)
    return result._replace(context=context), captured


def _file(entry: Any, record: Record | None, rows: int) -> None:
    """Notes what a backward's capture says of its form, and of forms that differ in the number of rows alone."""
    replay = None if record is None else replay_of([record])
    entry.what = replay or REFUSED
    entry.family.add(rows, replay and record, replay_of)
