"""The last replay of a container, for repetition: an equal call needs no binding and no look-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..compiler.flatten import FlatContainer
from ..contract.config import Config, thread_config
from ..contract.torch_private import tensor_guards
from ..replay.calls import CallKey, observer
from ..replay.guards import are_aligned
from ..runtime.autograd import Runtime
from ..runtime.devices import current_stream


class Circumstances:
    """Everything besides tensors that a call depends on, and that must be unchanged."""

    def __init__(self, layout: FlatContainer, names: list[str], runtime: Runtime, config: Config) -> None:
        self._names, self._grad_enabled, self._config = names, runtime.grad_enabled, config
        self._ops, self._hooks = layout.ops, layout.hooks
        self._version = sum([op.attribute_version for op in layout.ops])

    def hold(self, shared: Mapping[str, Any]) -> bool:
        """Whether the circumstances of a call with these keywords are unchanged."""
        if [*shared] != self._names or thread_config.config is not self._config or any(self._hooks):
            return False
        if torch.is_grad_enabled() is not self._grad_enabled:
            return False
        version = 0
        for op in self._ops:
            version += op.attribute_version
        return version == self._version


class RepeatedReplay:
    """A replayed call with the same number of rows: only its tensors are guarded, without the look-up of a form.

    Attributes:
        last: the state of the call for ``explain()``.
    """

    def __init__(
        self, layout: FlatContainer, names: list[str], positions: list[int], key: CallKey, captured: Any, last: Any
    ) -> None:
        self.last, self._captured, self._rows = last, captured, key.rows
        self._circumstances = Circumstances(layout, names, last.runtime, thread_config.config)
        self._holders, self._grad_enabled = layout.holders, last.runtime.grad_enabled
        self._number, self._check = len(key.pool), tensor_guards(key.pool)
        self._order = _order(positions)

    @classmethod
    def of(
        cls,
        layout: FlatContainer,
        names: list[str],
        arguments: Sequence[Any],
        values: Sequence[Any],
        key: CallKey,
        captured: Any,
        last: Any,
    ) -> RepeatedReplay | None:
        """The repetition of a replay; None if something else may matter, or the values are not each argument once."""
        ids, of_values = [*map(id, arguments)], [*map(id, values)]
        if sorted(ids) != sorted(of_values) or last.runtime.autocast_dtype or any([op._modules for op in layout.ops]):
            return None
        return cls(layout, names, [*map(ids.index, of_values)], key, captured, last)

    def values(self, x: Tensor, extra: tuple[Any, ...], shared: Mapping[str, Any]) -> list[Any] | None:
        """The pool of the call if all guards pass, else None."""
        if observer() or not self._circumstances.hold(shared):
            return None
        arguments, pool = [x, *extra, *shared.values()], list[Any]()
        for op in self._holders:
            pool += op.autograd_inputs(self._grad_enabled)
        pool += arguments if self._order is None else self._order(arguments)
        is_like = len(pool) == self._number and self._check(*pool) and x.device.type in current_stream
        return pool if is_like and are_aligned(pool) else None

    def run(self, pool: list[Any]) -> Any:
        """Replays the call."""
        return self._captured.run(pool, self._rows)


def _order(positions: list[int]) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None:
    """A function that reorders tensors to the plan's order; None if they are already in it."""
    return None if positions == [*range(len(positions))] else itemgetter(*positions)
