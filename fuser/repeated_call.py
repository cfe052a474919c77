"""The last call of a container, to be repeated: calls like it are neither bound nor planned anew, nor looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .compiler.flatten import FlatContainer
from .compiler.plan import Plan
from .config import Config, thread_config
from .op import Op
from .replay.calls import observer
from .replay.guards import are_misaligned
from .runtime.autograd import Runtime
from .runtime.devices import current_stream
from .torch_private import profiler_enabled, tensor_guards


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
        self._order = None if positions == [*range(len(positions))] else itemgetter(*positions)
        values = self._in_order(tensors)
        checks = self._plan.value_checks(values)
        self._value_checks = [(positions[slot], look) for slot, look in checks or ()]
        self._checked: int | None = None
        if self._plan.passed is not None:
            self._checked = self._plan.passed.get(tuple(noted.shapes))
        elif checks is not None:
            self._checked = self._plan.check(values, self._runtime)
        self._again = None if checks is None else self._plan.again(tensors, positions, self._runtime)

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
        if self._again is not None and not profiler_enabled():
            outputs = self._again.run(tensors)
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


class PoolGuards(NamedTuple):
    """The guards of a captured call on the tensors that its ops hold, then its values."""

    holders: Sequence[Op]
    grad_enabled: bool
    number: int  # of all
    check: Callable[..., bool]

    def pool(self, values: Sequence[Any]) -> list[Any] | None:
        """All of them; None where a guard fails."""
        pool: list[Any] = []
        for op in self.holders:
            pool += op.autograd_inputs(self.grad_enabled)
        pool += values
        return pool if len(pool) == self.number and self.check(*pool) else None


class RepeatedReplay:
    """A call that is replayed for as many rows again: the guards of its form, without a key to look them up by.

    Attributes:
        last: what ``explain()`` needs of the call.
    """

    def __init__(
        self,
        layout: FlatContainer,
        names: list[str],
        positions: list[int],
        guards: PoolGuards,
        replay: Callable[..., Any],
        last: Any,
    ) -> None:
        self.last, self._guards, self._replay = last, guards, replay
        self._circumstances = Circumstances(layout, names, last.runtime, thread_config.config)
        self._order = None if positions == [*range(len(positions))] else itemgetter(*positions)

    @classmethod
    def of(
        cls,
        layout: FlatContainer,
        names: list[str],
        arguments: Sequence[Any],
        values: Sequence[Any],
        guards: PoolGuards,
        replay: Callable[..., Any],
        last: Any,
    ) -> RepeatedReplay | None:
        """None where something else may count, or the values are not the arguments, each once.

        Args:
            replay: of a pool and the addresses in it.
        """
        ids, of_values = [*map(id, arguments)], [*map(id, values)]
        if sorted(ids) != sorted(of_values) or last.runtime.autocast_dtype or any([op._modules for op in layout.ops]):
            return None
        return cls(layout, names, [*map(ids.index, of_values)], guards, replay, last)

    def values(
        self, x: Tensor, extra: tuple[Any, ...], shared: Mapping[str, Any]
    ) -> tuple[list[Any], list[int]] | None:
        """The pool of the call and the addresses in it, where all guards pass; else None."""
        if observer() or not self._circumstances.hold(shared):
            return None
        arguments = [x, *extra, *shared.values()]
        pool = self._guards.pool(arguments if self._order is None else self._order(arguments))
        if pool is None or x.device.type not in current_stream:
            return None
        addresses = list(map(Tensor.data_ptr, pool))
        return None if are_misaligned(addresses) else (pool, addresses)

    def run(self, values: tuple[list[Any], list[int]]) -> Any:
        """Replays the call."""
        return self._replay(*values)
