"""A captured forward of an op in a call, and its captured backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from torch import Tensor

from ..op import Op, SideEffects
from ..runtime.autograd import apply
from ..runtime.call import BackwardContext, ForwardResult, refuse_overlaps
from ..runtime.devices import stream_of
from .capture import Capture
from .captured import Captured, replay_of
from .guards import UNSUPPORTED, GuardedCache
from .program import Replay


class CapturedBackward(NamedTuple):
    """A backward that replays an earlier one of the same form, and what the replay was built from."""

    replay: Replay
    captured: Captured

    @classmethod
    def of(cls, captures: Sequence[Captured]) -> CapturedBackward | None:
        """From one capture, for its number of rows; from several, for any. None where they do not fit together."""
        replay = replay_of(captures)
        return replay and cls(replay, captures[0])

    @classmethod
    def joined(cls, several: Sequence[CapturedBackward]) -> CapturedBackward | None:
        return cls.of([each.captured for each in several])


@dataclass(slots=True)
class CapturedContext(BackwardContext):
    """The context of a captured forward. Its backward is captured once for each form, then replayed.

    Attributes:
        ops: the op and its parts. A capture holds only until one of their attributes is assigned.
        cache: the replays of backwards, by the form of the tensors that they were given.
    """

    ops: tuple[Op, ...] = ()
    cache: GuardedCache[CapturedBackward] = field(default_factory=GuardedCache, compare=False)

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
        effects: tuple[SideEffects, ...] = ()
        wanted = self.wanted
        deliveries = self.op.deliveries(wanted)
        if deliveries:
            requested, wanted = self.requested(deliveries, node)
            effects = tuple([each.side_effects() for each in requested])
            refuse_overlaps(self.op, requested, effects, lent)
        given = [*tensors, *lent, *douts]
        if effects:
            written = [tensor for each in effects for tensor in each.tensors]
            given += dict(zip(map(id, written), written, strict=True)).values()  # each once
        for value in joined:
            given += (value,) if type(value) is Tensor else value
        addresses = list(map(Tensor.data_ptr, given))
        facts = tuple([each.facts for each in effects]) if effects else ()
        key = len(given), facts, *[op.attribute_version for op in self.ops]
        rows = douts[0].shape[0] if douts[0].dim() else 0
        entry = self.cache.entry(key, given, rows)
        if entry.state is UNSUPPORTED or reduce(or_, addresses) & 15:
            del given  # so that the backward alone has the tensors, and lets go of each
            return self.run(tensors, lent, joined, douts, wanted, node)
        if entry.capture is None:
            with Capture(given, rows) as capture:
                grads = self.run(tensors, lent, joined, douts, wanted, node)
            self._file(entry, capture, rows, grads)
            return grads
        replay = entry.capture.replay
        made = replay.run(given, addresses, rows, stream_of(given[0]))
        for each in effects:
            if each.done is not None:
                each.done()
        return [None if i is None else made[i] for i in replay.made]

    def _file(self, entry: Any, capture: Capture, rows: int, grads: list[Tensor | None]) -> None:
        captured = capture.result(grads)
        if captured is None:
            entry.refuse(f"{type(self.op).__name__}.bwd: {capture.refusal}")
        else:
            entry.file(rows, CapturedBackward.of([captured]))


class CapturedStep(NamedTuple):
    """A forward of a step that replays an earlier one of the same form.

    A call has a pool of tensors: those that it is given, those that its ops hold, then the outputs of its steps.

    Attributes:
        kept, lent: the positions, in the tensors of the replay, of what it keeps for its backward.
        inputs: the positions in the pool of what autograd is given; nothing where it is not asked.
        reads: of what is launched on; None where that is the whole pool.
        dead: of what nothing reads any more.
        captured: what the replay was built from.
    """

    replay: Replay
    kept: tuple[int, ...]
    lent: tuple[int, ...]
    context: CapturedContext
    inputs: tuple[int, ...]
    reads: tuple[int, ...] | None
    dead: tuple[int, ...]
    captured: Captured

    def run(self, pool: list[Any], addresses: list[int], rows: int, stream: int) -> None:
        """Replays the forward on the pool, to which it adds its outputs."""
        reads = self.reads
        if reads is None:
            given, given_addresses = pool[:], addresses[:]
        else:
            given, given_addresses = [pool[i] for i in reads], [addresses[i] for i in reads]
        if self.inputs:
            inputs = [pool[i] for i in self.inputs]
            outputs = apply(lambda flags: self.forward(given, given_addresses, rows, stream), *inputs)
        else:
            tensors: list[Any] = self.replay.run(given, given_addresses, rows, stream)
            outputs = (*[tensors[i] for i in self.replay.made],)  # type: ignore[index]
        pool += outputs
        addresses += map(Tensor.data_ptr, outputs)
        for i in self.dead:
            pool[i] = None

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
            if (
                step._replace(replay=first.replay, captured=first.captured) != first
                or step.context is not first.context
            ):
                return None
        return replay and first._replace(replay=replay)
