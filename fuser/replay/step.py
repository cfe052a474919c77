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
from .guards import UNSUPPORTED, GuardedCache, GuardedEntry
from .program import Captured, Replay


@dataclass(slots=True)
class CapturedContext(BackwardContext):
    """The context of a captured forward. Its backward is captured once for each form, then replayed.

    Attributes:
        ops: the op and its parts. A capture holds only until one of their attributes is assigned.
        cache: the captured backwards, by the form of the tensors that they read and write.
    """

    ops: tuple[Op, ...] = ()
    cache: GuardedCache = field(default_factory=GuardedCache, compare=False)

    @classmethod
    def of(cls, context: BackwardContext, op: Op) -> CapturedContext:
        ops = tuple([module for module in op.modules() if isinstance(module, Op)])
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
        inputs = [*tensors, *lent, *douts]
        if effects:
            written = [tensor for each in effects for tensor in each.tensors]
            inputs += dict(zip(map(id, written), written, strict=True)).values()  # each once
        for value in joined:
            inputs += (value,) if type(value) is Tensor else value
        addresses = list(map(Tensor.data_ptr, inputs))
        facts = tuple([each.facts for each in effects]) if effects else ()
        key = len(inputs), facts, *[op.attribute_version for op in self.ops]
        rows = douts[0].shape[0] if douts[0].ndim else 0
        entry = self.cache.entry(key, inputs, rows)
        if entry.state is UNSUPPORTED or reduce(or_, addresses) & 15:
            del inputs  # so that the backward alone has the tensors, and lets go of each
            return self.run(tensors, lent, joined, douts, wanted, node)
        if entry.captured is None:
            assert isinstance(entry, GuardedEntry)  # the others have a capture
            with Capture(inputs, rows) as capture:
                grads = self.run(tensors, lent, joined, douts, wanted, node)
            recording = capture.recording(grads)
            if recording is None:
                entry.refuse(f"{type(self.op).__name__}.bwd: {capture.refusal}")
            else:
                entry.file(Captured.of([recording]))
            return grads
        grads = entry.captured.replays[0].run(inputs, addresses, rows, stream_of(inputs[0]))
        for each in effects:
            if each.done is not None:
                each.done()
        return grads


class CapturedStep(NamedTuple):
    """What the replay of a forward reads of its call, and what it leaves.

    A call has a pool of tensors: those that it is given, those that its ops hold, then the outputs of its steps.

    Attributes:
        inputs: the positions in the pool of what autograd is given; nothing where it is not asked.
        reads: of what is launched on; None where that is the whole pool.
        last_uses: of what nothing reads any more.
        outputs: how many of the results are outputs.
        saved: how many come before those that are buffers of the caller, which autograd does not save.
    """

    context: CapturedContext
    inputs: tuple[int, ...]
    reads: tuple[int, ...] | None
    last_uses: tuple[int, ...]
    outputs: int
    saved: int

    def run(self, replay: Replay, pool: list[Any], addresses: list[int], rows: int, stream: int) -> None:
        """Replays the forward on the pool, to which it adds its outputs."""
        reads = self.reads
        outputs: Sequence[Tensor]
        if reads is None:
            tensors, starts = pool[:], addresses[:]
        else:
            tensors, starts = [pool[i] for i in reads], [addresses[i] for i in reads]
        if self.inputs:
            inputs = [pool[i] for i in self.inputs]
            outputs = apply(lambda flags: self._result(replay.run(tensors, starts, rows, stream)), *inputs)
        else:
            outputs = replay.run(tensors, starts, rows, stream)
        pool += outputs
        addresses += map(Tensor.data_ptr, outputs)
        for i in self.last_uses:
            pool[i] = None

    def _result(self, results: list[Any]) -> ForwardResult:
        """The outputs, and what the backward needs."""
        outputs, kept, lent = results[: self.outputs], results[self.outputs : self.saved], results[self.saved :]
        apart = self.context.apart() if self.context.sources else ()
        return ForwardResult(tuple(outputs), kept, apart, lent, self.context)
