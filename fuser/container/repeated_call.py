"""The last call of a container, for repetition: an equal call needs no binding, plan or look-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compiler.flatten import FlatContainer
from ..compiler.plan import Plan
from ..contract.config import Config, thread_config
from ..contract.torch_private import profiler_enabled, tensor_guards
from ..replay.calls import CallKey, observer
from ..replay.guards import are_aligned
from ..runtime.autograd import Runtime
from ..runtime.devices import current_stream


class Repeated(Protocol):
    """A call that may be repeated."""

    last: Any

    def values(self, x: Tensor, extra: tuple[Any, ...], shared: Mapping[str, Any], /) -> Any:
        """The argument of :meth:`run` if all guards pass, else None."""

    def run(self, values: Any, /) -> Any:
        """Runs the call."""


class Noted(Protocol):
    """The state kept of a call for ``explain()``."""

    plan: Plan
    shapes: list[Any]
    runtime: Runtime


class Circumstances:
    """Everything besides tensors that a call depends on, and that must be unchanged."""

    def __init__(self, layout: FlatContainer, names: list[str], runtime: Runtime, config: Config) -> None:
        self._names, self._grad_enabled, self._config = names, runtime.grad_enabled, config
        self._ops, self._hooks = layout.ops, layout.hooks
        self._version = sum([op.attribute_version for op in layout.ops])

    def hold(self, shared: Mapping[str, Any]) -> bool:
        """Whether the circumstances of a call with these keywords are unchanged; checked for every short
        call on a CPU.
        """
        if [*shared] != self._names or thread_config.config is not self._config or any(self._hooks):
            return False
        if torch.is_grad_enabled() is not self._grad_enabled:
            return False
        version = 0
        for op in self._ops:
            version += op.attribute_version
        return version == self._version


class RepeatedCall:
    """A plan, and the guards of a call that runs it at once.

    Every call checks everything that the plan depends on: forms of arguments and parameters, by torch's own guards,
    which also see autocast and inference mode; values that ops check; assignments to ops; hooks; and switches. The ops
    of the plan must promise that nothing else matters: see :attr:`Op.replayable`.

    Attributes:
        last: the state of the call for ``explain()``.
    """

    def __init__(
        self, layout: FlatContainer, names: list[str], arguments: Sequence[Tensor], positions: list[int], last: Any
    ) -> None:
        noted: Noted = last
        self.last, self._plan, self._runtime = last, noted.plan, noted.runtime
        self._circumstances = Circumstances(layout, names, noted.runtime, noted.plan.config)
        self._arguments = len(arguments)
        self._held = [(op, [n for n, p in op._parameters.items() if p is not None]) for op in layout.holders]
        tensors = self._with_parameters(arguments)
        self._number, self._check = len(tensors), tensor_guards(tensors)
        self._order = _order(positions)
        values = self._in_order(tensors)
        checks = self._plan.value_checks(values)
        self._value_checks = [(positions[slot], look) for slot, look in checks or ()]
        self._checked: int | None = None
        if self._plan.passed is not None:
            self._checked = self._plan.passed.get(tuple(noted.shapes))
        elif checks is not None:
            self._checked = self._plan.check(values, self._runtime)
        self._step = None if checks is None else self._plan.repeated_step(tensors, positions, self._runtime)

    @classmethod
    def of(
        cls, layout: FlatContainer, names: list[str], arguments: Sequence[Any], values: Sequence[Any], last: Any
    ) -> RepeatedCall | None:
        """The repetition of a call; None if something else may matter, an argument is not a tensor, or two are the same
        one.

        Args:
            names: the names of the keyword arguments, which come last, after ``x`` and other positional ones.
            values: the arguments in the plan's order.
        """
        ids = [id(argument) for argument in arguments if type(argument) is Tensor]
        if len(set(ids)) < len(arguments) or any(layout.hooks) or any([op._modules for op in layout.ops]):
            return None
        if any([step.replay_refusal is not None for step in last.plan.steps]) or last.runtime.autocast_dtype:
            return None
        return cls(layout, names, arguments, [ids.index(id(value)) for value in values], last)

    def values(self, x: Tensor, extra: tuple[Any, ...], shared: Mapping[str, Any]) -> list[Any] | None:
        """The arguments and parameters if all guards pass, else None."""
        if not self._circumstances.hold(shared):
            return None
        tensors = self._with_parameters([x, *extra, *shared.values()])
        if len(tensors) != self._number or not self._check(*tensors):
            return None
        for position, look in self._value_checks:
            if not look(tensors[position]):  # an error is raised by the call that is not a repetition
                return None
        return tensors

    def run(self, tensors: list[Any]) -> Any:
        """Runs the plan, or its one step."""
        if self._step is not None and not profiler_enabled():
            outputs = self._step.run(tensors)
            return outputs[0] if len(outputs) == 1 else outputs
        return self._plan(self._in_order(tensors), self._runtime, None, self._checked)

    def _in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The arguments in the plan's order."""
        return [*tensors[: self._arguments]] if self._order is None else [*self._order(tensors)]

    def _with_parameters(self, arguments: Sequence[Any]) -> list[Any]:
        tensors = [*arguments]
        for op, held in self._held:
            tensors += map(op._parameters.get, held)
        return tensors


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
