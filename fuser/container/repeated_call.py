"""The last call of a container, to be repeated: calls like it are neither bound nor planned anew, nor looked up."""

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
        """What :meth:`run` takes, where all guards pass; else None."""

    def run(self, values: Any, /) -> Any:
        """Runs the call."""


class Noted(Protocol):
    """What is kept of a call for ``explain()``."""

    plan: Plan
    shapes: list[Any]
    runtime: Runtime


class Circumstances:
    """All but tensors that a call depends on, which has to be what it was."""

    def __init__(self, layout: FlatContainer, names: list[str], runtime: Runtime, config: Config) -> None:
        self._names, self._grad_enabled, self._config = names, runtime.grad_enabled, config
        self._ops, self._hooks = layout.ops, layout.hooks
        self._version = sum([op.attribute_version for op in layout.ops])

    def hold(self, shared: Mapping[str, Any]) -> bool:
        """Whether a call with these keywords has the circumstances: every short call on a CPU is asked here."""
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

    Every call checks all that the plan depends on: the form of arguments and parameters, by torch's own guards, which
    see autocast and inference mode as well; values that ops check; assignments to ops; hooks; and switches. Only plans
    are taken whose ops promise that nothing else counts: see :attr:`Op.replayable`.

    Attributes:
        last: what ``explain()`` needs of the call.
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
        """None where something else may count, or an argument is no tensor, or is one with another.

        Args:
            names: of those arguments that are keywords, the last ones; ``x`` and others stand before them.
            values: the arguments in the order in which the plan takes them.
        """
        ids = [id(argument) for argument in arguments if type(argument) is Tensor]
        if len(set(ids)) < len(arguments) or any(layout.hooks) or any([op._modules for op in layout.ops]):
            return None
        if any([step.replay_refusal is not None for step in last.plan.steps]) or last.runtime.autocast_dtype:
            return None
        return cls(layout, names, arguments, [ids.index(id(value)) for value in values], last)

    def values(self, x: Tensor, extra: tuple[Any, ...], shared: Mapping[str, Any]) -> list[Any] | None:
        """The arguments and the parameters, where all guards pass; else None."""
        if not self._circumstances.hold(shared):
            return None
        tensors = self._with_parameters([x, *extra, *shared.values()])
        if len(tensors) != self._number or not self._check(*tensors):
            return None
        for position, look in self._value_checks:
            if not look(tensors[position]):  # what is wrong, a call that is no repetition says
                return None
        return tensors

    def run(self, tensors: list[Any]) -> Any:
        """Runs the plan, or its one step."""
        if self._step is not None and not profiler_enabled():
            outputs = self._step.run(tensors)
            return outputs[0] if len(outputs) == 1 else outputs
        return self._plan(self._in_order(tensors), self._runtime, None, self._checked)

    def _in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The arguments, as the plan takes them."""
        return [*tensors[: self._arguments]] if self._order is None else [*self._order(tensors)]

    def _with_parameters(self, arguments: Sequence[Any]) -> list[Any]:
        tensors = [*arguments]
        for op, held in self._held:
            tensors += map(op._parameters.get, held)
        return tensors


class RepeatedReplay:
    """A call that is replayed for as many rows again: guards on its tensors, without a key to look a form up by.

    Attributes:
        last: what ``explain()`` needs of the call.
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
        """None where something else may count, or the values are not the arguments, each once."""
        ids, of_values = [*map(id, arguments)], [*map(id, values)]
        if sorted(ids) != sorted(of_values) or last.runtime.autocast_dtype or any([op._modules for op in layout.ops]):
            return None
        return cls(layout, names, [*map(ids.index, of_values)], key, captured, last)

    def values(self, x: Tensor, extra: tuple[Any, ...], shared: Mapping[str, Any]) -> list[Any] | None:
        """The pool of the call, where all guards pass; else None."""
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
    """Takes tensors into the order of the plan; None: they are in it."""
    return None if positions == [*range(len(positions))] else itemgetter(*positions)
