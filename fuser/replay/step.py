"""A captured forward of an op in a call, and its captured backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..op import Delivery, Op
from ..runtime.autograd import apply
from ..runtime.call import BackwardContext, ForwardResult
from ..runtime.devices import stream_of
from .capture import Capture, Replay
from .guards import GuardedCache

attribute_version = attrgetter("attribute_version")


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

    def run(
        self,
        tensors: list[Tensor],
        lent: Sequence[Tensor],
        joined: Sequence[Any],
        douts: tuple[Tensor, ...],
        wanted: frozenset[str],
        node: Any,
        requested: Sequence[Delivery],
    ) -> list[Tensor | None]:
        """As of the base class, by a replay where one has been captured for such tensors."""
        inputs, effects = [*tensors, *lent, *douts], [each.side_effects() for each in requested] if requested else ()
        if effects:
            written = [tensor for each in effects for tensor in each.tensors]
            inputs += dict(zip(map(id, written), written, strict=True)).values()  # each once
        for value in joined:
            inputs += (value,) if type(value) is Tensor else value
        facts = tuple([each.facts for each in effects]) if effects else ()
        key, rows = (len(inputs), facts, *map(attribute_version, self.ops)), douts[0].shape[0] if douts[0].ndim else 0
        form, entry, addresses = self.cache.find(key, inputs, rows)
        if entry.captured is None:
            capture = Capture(inputs, rows) if entry.refusal is None else None
            del inputs  # so that without a capture the backward alone has the tensors, and lets go of each
            with capture or nullcontext():
                grads = BackwardContext.run(self, tensors, lent, joined, douts, wanted, node, requested)
            if capture is not None and (reason := capture.finish(grads)) is not None:
                form.refuse(rows, f"{type(self.op).__name__}.bwd: {reason}")
            elif capture is not None:
                captured = Replay.of(capture, form.partner)
                form.file(rows, captured, captured.sizes is None)
            return grads
        replay: Replay = entry.captured
        grads = replay.run(inputs, addresses, rows, stream_of(inputs[0]))
        for each in effects:
            if each.done is not None:
                each.done()
        return grads


class CapturedStep(NamedTuple):
    """What the replay of a forward reads of its call, and what it leaves.

    Attributes:
        inputs: the positions in the pool of what autograd is given; nothing where it is not asked.
        reads, last_uses: of what is launched on, and of what nothing reads any more.
        outputs: how many of the results are outputs.
        saved: how many come before those that are buffers of the caller, which autograd does not save.
    """

    replay: Replay
    context: CapturedContext
    inputs: list[int]
    reads: list[int]
    last_uses: list[int]
    outputs: int
    saved: int

    def run(self, pool: list[Any], addresses: list[int], rows: int, stream: int) -> None:
        """Replays the forward on the pool, to which it adds its outputs."""
        tensors, starts = [*map(pool.__getitem__, self.reads)], [*map(addresses.__getitem__, self.reads)]
        run = partial(self.replay.run, tensors, starts, rows, stream)
        inputs = map(pool.__getitem__, self.inputs)
        outputs = apply(partial(self._result, run), *inputs) if self.inputs else run()
        pool += outputs
        addresses += map(Tensor.data_ptr, outputs)
        for i in self.last_uses:
            pool[i] = None

    def _result(self, run: Callable[[], list[Any]], flags: tuple[bool, ...]) -> ForwardResult:
        """The outputs, and what the backward needs."""
        results, apart = run(), self.context.apart() if self.context.sources else ()
        kept, lent = results[self.outputs : self.saved], results[self.saved :]
        return ForwardResult(tuple(results[: self.outputs]), kept, apart, lent, self.context)
