"""The last call of a container, to be repeated: calls like it are neither bound nor planned anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from .compiler.flatten import FlatContainer
from .compiler.plan import Plan
from .config import thread_config
from .runtime.autograd import Runtime
from .torch_private import tensor_guards


class Noted(Protocol):
    """What is kept of a call for ``explain()``."""

    plan: Plan
    shapes: list[Any]
    runtime: Runtime


class RepeatedCall:
    """A plan, and the guards of a call that runs it at once.

    Every call checks all that the plan depends on: the form of arguments and parameters, by torch's own guards, which
    see autocast and inference mode as well; assignments to ops; hooks; and switches. Only plans are taken whose ops
    promise that nothing else counts: see :attr:`Op.replayable`.

    Attributes:
        last: what ``explain()`` needs of the call.
    """

    def __init__(self, layout: FlatContainer, names: list[str], arguments: Sequence[Tensor], last: Any) -> None:
        noted: Noted = last
        self.last, self._plan, self._runtime, self._names = last, noted.plan, noted.runtime, names
        self._ops, self._hooks = layout.ops, layout.hooks
        self._held = [(op, [n for n, p in op._parameters.items() if p is not None]) for op in layout.holders]
        self._version, tensors = sum([op.attribute_version for op in layout.ops]), [*arguments]
        for op, held in self._held:
            tensors += map(op._parameters.get, held)  # type: ignore[arg-type]
        self._number, self._check = len(tensors), tensor_guards(tensors)
        self._checked = None if self._plan.passed is None else self._plan.passed.get(tuple(noted.shapes))
        self._values: itemgetter[Any] | None = None

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
        call = cls(layout, names, arguments, last)
        positions = [ids.index(id(value)) for value in values]
        if positions != [*range(len(ids))]:
            call._values = itemgetter(*positions)
        return call

    def values(self, x: Tensor, extra: tuple[Any, ...], shared: Mapping[str, Any]) -> list[Any] | None:
        """What the plan takes, where all guards pass; else None.

        Every short call on a CPU is looked at here, so all is written out.
        """
        if [*shared] != self._names or thread_config.config is not self._plan.config or any(self._hooks):
            return None
        if torch.is_grad_enabled() is not self._runtime.grad_enabled:
            return None
        version = 0
        for op in self._ops:
            version += op.attribute_version
        arguments = [x, *extra, *shared.values()]
        tensors = arguments[:]
        for op, held in self._held:
            tensors += map(op._parameters.get, held)
        if version != self._version or len(tensors) != self._number or not self._check(*tensors):
            return None
        return arguments if self._values is None else [*self._values(arguments)]

    def run(self, values: list[Any]) -> Any:
        """Runs the plan."""
        return self._plan(values, self._runtime, None, self._checked)
