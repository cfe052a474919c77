"""The last replay of a container, for repetition: an equal call needs no binding and no look-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from ..compiler.flatten import FlatContainer
from ..contract.config import thread_config
from ..contract.op import Keywords
from ..contract.torch_private import tensor_guards
from ..replay.calls import CallKey, CapturedCall, LastCall, observer
from ..replay.guards import are_aligned
from ..runtime.buffers import SlotValues
from ..runtime.devices import current_stream


class RepeatedReplay:
    """A replayed call with the same number of rows: only its tensors are guarded, without the look-up of a form.

    Attributes:
        last: the state of the call for ``explain()``.
    """

    def __init__(
        self, layout: FlatContainer, names: list[str], key: CallKey, captured: CapturedCall, last: LastCall
    ) -> None:
        self.last, self._captured, self._rows = last, captured, key.rows
        self._names, self._grad_enabled, self._config = names, last.runtime.grad_enabled, thread_config.config
        self._ops, self._hooks, self._holders = layout.ops, layout.hooks, layout.holders
        self._version = sum([op.attribute_version for op in layout.ops])
        self._number, self._check = len(key.pool), tensor_guards(key.pool)
        self._order: Callable[[SlotValues], tuple[object, ...]] | None = None  # of the arguments, if not the plan's

    @classmethod
    def of(
        cls,
        layout: FlatContainer,
        names: list[str],
        arguments: Sequence[object],
        values: Sequence[object],
        key: CallKey,
        captured: CapturedCall,
        last: LastCall,
    ) -> RepeatedReplay | None:
        """The repetition of a replay; None if something else may matter, or the values are not each argument once."""
        ids, of_values = [*map(id, arguments)], [*map(id, values)]
        if sorted(ids) != sorted(of_values) or last.runtime.autocast_dtype or any([op._modules for op in layout.ops]):
            return None
        repeated = cls(layout, names, key, captured, last)
        if ids != of_values:
            repeated._order = itemgetter(*map(ids.index, of_values))
        return repeated

    def _holds(self, shared: Keywords) -> bool:
        """Whether everything besides tensors that a call depends on is unchanged."""
        if [*shared] != self._names or thread_config.config is not self._config or any(self._hooks):
            return False
        if torch.is_grad_enabled() is not self._grad_enabled:
            return False
        version = 0
        for op in self._ops:
            version += op.attribute_version
        return version == self._version

    def values(self, x: Tensor, extra: tuple[object, ...], shared: Keywords) -> SlotValues | None:
        """The pool of the call if all guards pass, else None."""
        if observer() or not self._holds(shared):
            return None
        pool: SlotValues = []
        arguments: SlotValues = [x, *extra, *shared.values()]
        for op in self._holders:
            pool += op.autograd_inputs(self._grad_enabled)
        pool += arguments if self._order is None else self._order(arguments)
        is_like = len(pool) == self._number and self._check(*pool) and x.device.type in current_stream
        return pool if is_like and are_aligned(pool) else None

    def run(self, pool: SlotValues) -> object:
        """Replays the call."""
        return self._captured.run(pool, self._rows)
