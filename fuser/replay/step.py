"""Captures the forward and the backward of one op, and replays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from ..op import Op, Targets
from ..runtime.autograd import apply
from ..runtime.call import BackwardContext, EagerStep, ForwardResult, refuse_overlaps
from .capture import Capture
from .captured import Captured, replay_of
from .guards import UNSUPPORTED, GuardedCache
from .program import Replay, aligned, stream_of


@dataclass(slots=True)
class CapturedContext(BackwardContext):
    """The context of a captured forward. Its backward is captured once for each form, then replayed.

    Attributes:
        ops: the op and its parts. A capture holds only until one of their attributes is assigned.
        cache: the replays of backwards, by the form of the tensors that they were given.
    """

    ops: tuple[Op, ...] = ()
    cache: GuardedCache[Replay] = field(default_factory=GuardedCache, compare=False)

    @classmethod
    def of(cls, context: BackwardContext, ops: tuple[Op, ...]) -> CapturedContext:
        return cls(**{each.name: getattr(context, each.name) for each in fields(context)}, ops=ops)

    def gradients(
        self, tensors: list[Tensor], lent: Sequence[Tensor], douts: tuple[Tensor, ...], node: Any
    ) -> list[Tensor | None]:
        """As of the base class, by a replay where one has been captured for such tensors."""
        joined: list[Tensor | Sequence[Tensor]] = []
        if self.sources:
            joined = self.joined(tensors)
            del tensors[self.number :]
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
        entry = self.cache.entry(key, given, rows)
        replay = entry.state
        if replay is UNSUPPORTED or not aligned(addresses):
            del given  # so that the backward alone has the tensors, and lets go of each
            return self.run(tensors, lent, joined, douts, wanted, node)
        if type(replay) is not Replay:
            with Capture(given) as capture:
                grads = self.run(tensors, lent, joined, douts, wanted, node)
            _file(entry, capture.result(rows, grads), rows)
            return grads
        made = replay.run(given, addresses, rows, stream_of(given[0]))
        for each in targets:
            if each.done is not None:
                each.done()
        return [None if i is None else made[i] for i in replay.made]


class CapturedStep(NamedTuple):
    """A forward that replays an earlier one of the same form.

    Attributes:
        kept, lent: the positions, in the tensors of the replay, of what it keeps for its backward.
        captured: what the replay was made from; those of several lengths make a replay for any number of rows.
    """

    replay: Replay
    kept: tuple[int, ...]
    lent: tuple[int, ...]
    context: CapturedContext
    captured: Captured

    def run(
        self, given: list[Tensor], addresses: list[int], rows: int, stream: int, inputs: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Replays the forward; ``inputs`` are those of autograd, empty where it does not record."""
        if inputs:
            return apply(lambda flags: self.forward(given, addresses, rows, stream), *inputs)
        tensors: list[Any] = self.replay.run(given, addresses, rows, stream)
        return tuple([tensors[i] for i in self.replay.made])  # type: ignore[index]

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
        first, replay = several[0], replay_of([step.captured for step in several])
        for step in several:
            if step.context is not first.context or (step.kept, step.lent) != (first.kept, first.lent):
                return None
        return replay and first._replace(replay=replay)


def capture_step(
    step: EagerStep, x: Tensor, wanted: frozenset[str], contexts: list[CapturedContext]
) -> tuple[ForwardResult, CapturedStep | None]:
    """Runs a forward and captures it; None where it cannot be replayed.

    Args:
        contexts: those of captures with other numbers of rows, whose backwards are captured together. A context that
            equals none of them is added.
    """
    with Capture(step.inputs(x)) as capture:
        result = step.run(x, wanted)
    rows = x.shape[0] if x.dim() else 0
    captured = capture.result(rows, result.outputs, (*result.kept, *result.lent) if wanted else ())
    if captured is None or (replay := replay_of([captured])) is None:
        return result, None
    ops = tuple([op for op in step.op.modules() if isinstance(op, Op)])
    new = CapturedContext.of(result.context, ops)
    context = next((context for context in contexts if context == new), new)
    if context is new:
        contexts.append(new)
    count = len(result.kept)
    replayed = CapturedStep(replay, replay.kept[:count], replay.kept[count:], context, captured)
    return result._replace(context=context), replayed


def _file(entry: Any, captured: Captured | None, rows: int) -> None:
    """Files a captured backward under its form, and with those that differ in the number of rows alone."""
    replay = None if captured is None else replay_of([captured])
    entry.state = replay or UNSUPPORTED
    entry.dynamic_rows.add(rows, replay and captured, replay_of)
