"""A captured forward of an op in a call, and its captured backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..op import Delivery, Op
from ..runtime.autograd import apply
from ..runtime.call import BackwardContext, BackwardInputs, ForwardResult
from ..runtime.devices import stream_of
from .capture import Capture, Replay
from .guards import GuardedCache

attribute_version = attrgetter("attribute_version")


@dataclass(slots=True)
class CapturedContext(BackwardContext):
    """The context of a captured forward. Its backward is captured once for each form, then replayed."""

    ops: tuple[Op, ...] = ()  # the op and its parts; a capture holds until one of their attributes is assigned
    # of backwards, by what they read and write
    cache: GuardedCache = field(default_factory=GuardedCache, compare=False)

    @classmethod
    def of(cls, context: BackwardContext, op: Op) -> CapturedContext:
        ops = tuple([module for module in op.modules() if isinstance(module, Op)])
        return cls(**{each.name: getattr(context, each.name) for each in fields(context)}, ops=ops)

    def run(
        self, inputs: BackwardInputs, wanted: frozenset[str], node: Any, requested: Sequence[Delivery]
    ) -> list[Tensor | None]:
        """As of the base class, by a replay where one has been captured for such tensors."""
        dy, tensors = inputs.douts[0], [*inputs.tensors, *inputs.lent, *inputs.douts]
        for value in inputs.joined:
            tensors += (value,) if type(value) is Tensor else value
        effects, facts = [each.side_effects() for each in requested] if requested else (), None
        if effects:
            tensors += {id(tensor): tensor for each in effects for tensor in each.tensors}.values()  # each once
            facts = tuple([each.facts for each in effects])
        key, rows = (len(tensors), facts, *map(attribute_version, self.ops)), dy.shape[0] if dy.ndim else 0
        form, entry, addresses = self.cache.find(key, tensors, rows)
        if entry.captured is None:
            capture = Capture(tensors, rows) if entry.refusal is None else None
            del tensors  # so that without a capture the backward alone has them, and lets go of each
            with capture or nullcontext():
                grads = BackwardContext.run(self, inputs, wanted, node, requested)
            if capture is not None and (reason := capture.finish(grads)) is not None:
                form.refuse(rows, f"{type(self.op).__name__}.bwd: {reason}")
            elif capture is not None:
                captured = Replay.of(capture, form.partner)
                form.file(rows, captured, captured.is_for_any_rows)
            return grads
        replay: Replay = entry.captured
        grads = replay.run(tensors, addresses, rows, stream_of(dy))
        for each in effects:
            if each.done is not None:
                each.done()
        return grads


class CapturedStep(NamedTuple):
    """What the replay of a forward reads of its call, and what it leaves."""

    replay: Replay
    context: CapturedContext
    inputs: list[int]  # the positions in the pool of what autograd is given; nothing where it is not asked
    reads: list[int]  # of what is launched on
    outputs: int  # of the results
    saved: int  # of the results, those before buffers of the caller, which autograd does not save

    def run(self, pool: list[Any], addresses: list[int], rows: int, stream: int) -> None:
        """Replays the forward on the pool, to which it adds its outputs."""
        reads = [*map(pool.__getitem__, self.reads)], [*map(addresses.__getitem__, self.reads)], rows, stream
        inputs = map(pool.__getitem__, self.inputs)
        outputs = apply(partial(self._result, reads), *inputs) if self.inputs else self.replay.run(*reads)
        pool += outputs
        addresses += map(Tensor.data_ptr, outputs)

    def _result(self, reads: tuple[list[Any], list[int], int, int], flags: tuple[bool, ...]) -> ForwardResult:
        """The outputs, and what the backward needs."""
        results, apart = self.replay.run(*reads), self.context.apart() if self.context.sources else ()
        kept, lent = results[self.outputs : self.saved], results[self.saved :]
        return ForwardResult(tuple(results[: self.outputs]), kept, apart, lent, self.context)
