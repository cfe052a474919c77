"""The last call of a container, for repetition: an equal call needs no binding and no look-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeAlias

import torch
from torch import Tensor

from ..compiler.flatten import FlatContainer
from ..contract.config import thread_config
from ..contract.op import Keywords
from ..contract.torch_private import tensor_guards
from ..replay.calls import CallKey, LastCall, observer
from ..replay.guards import address_bits
from ..runtime.buffers import SlotValues
from ..runtime.devices import current_stream

Run: TypeAlias = Callable[[SlotValues], object]


class RepeatedCall:
    """A call with the same number of rows: only its tensors are guarded, without the look-up of a form or plan.

    Attributes:
        last: the state of the call for ``explain()``.
        run: replays the call, or runs its plan, on the values that :meth:`values` returns.
    """

    def __init__(
        self, layout: FlatContainer, names: list[str], extra: int, key: CallKey, last: LastCall, run: Run, first: int
    ) -> None:
        self.last, self.run, self._first = last, run, first
        self._names, self._extra = names, extra
        self._grad_enabled, self._config = last.runtime.grad_enabled, thread_config.config
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
        last: LastCall,
        run: Run,
        first: int,
    ) -> RepeatedCall | None:
        """The repetition of a call; None if something else may matter, or the values are not each argument once.

        Args:
            run: takes the pool of the call, from its tensor number ``first`` on.
        """
        ids, of_values = [*map(id, arguments)], [*map(id, values)]
        if sorted(ids) != sorted(of_values) or last.runtime.autocast_dtype or any([op._modules for op in layout.ops]):
            return None
        repeated = cls(layout, names, len(arguments) - len(names) - 1, key, last, run, first)
        if ids != of_values:
            repeated._order = itemgetter(*map(ids.index, of_values))
        return repeated

    def values(self, x: Tensor, extra: tuple[object, ...], shared: Keywords) -> SlotValues | None:
        """The tensors that :attr:`run` takes; None if anything that the call depends on has changed."""
        if thread_config.config is not self._config or torch.is_grad_enabled() is not self._grad_enabled:
            return None
        if [*shared] != self._names or len(extra) != self._extra or any(self._hooks) or observer():
            return None
        version, arguments = 0, [x, *extra, *shared.values()]
        pool: SlotValues = []
        for op in self._ops:
            version += op.attribute_version
        for op in self._holders:
            pool += op.autograd_inputs(self._grad_enabled)
        pool += arguments if self._order is None else self._order(arguments)
        if version != self._version or len(pool) != self._number or not self._check(*pool):
            return None  # x need not be a tensor before this
        if x.device.type not in current_stream:
            return None
        return None if address_bits(map(Tensor.data_ptr, pool)) & 15 else pool[self._first :]
