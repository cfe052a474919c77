"""An op that is called by itself is a container of one: the same plans, checks, replays, errors and explanations.

The state between its calls must neither keep the op alive nor form a reference cycle with it. It therefore refers to a
view: another object of the op's class that shares all of its attributes. The op stores the state in a slot, which is
not an attribute: no state dict, copy or pickle of the op sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..compiler.binding import bind
from ..compiler.flatten import FlatContainer
from ..compiler.registry import registry
from ..contract.config import Flags
from ..contract.edits import tell_of_edits
from ..contract.op import Keywords, Op, OpKwargs
from ..contract.overrides import input_may_change
from ..explain.explanation import Explanation
from ..runtime.autograd import Runtime, caller
from .call_cache import CallCache, explain_last

if TYPE_CHECKING:
    from ..dynamo.steps import TracedPlan


class ContainerOfOne:
    """The state between the calls of an op, which is passed at every call."""

    def __init__(self) -> None:
        self.compiled: CallCache | None = None

    def current(self, op: Op) -> CallCache:
        """The state for the current structure of the op and the current fusions."""
        compiled = self.compiled
        if compiled is None or type(op) is not type(compiled.layout.modules[0]) or not compiled.layout.is_current(op):
            compiled = self.compiled = CallCache(FlatContainer(_view(op)))
            for module in op.modules() if op._modules else ():
                tell_of_edits(module, self)
        elif compiled.version != registry.version:
            compiled = self.compiled = CallCache(compiled.layout, compiled.last)
        return compiled

    def forget_children(self) -> None:
        """Drops the state of earlier calls, as the op, or one inside it, is being edited."""
        self.compiled = None


class Standalone:
    """The entry points of :class:`Op`."""

    def run(self, op: Op, x: Tensor, keywords: Keywords) -> object:
        keywords = {name: value for name, value in keywords.items() if value is not None}
        if torch.compiler.is_dynamo_compiling():
            from ..dynamo.frontend import run_op

            return run_op(op, x, keywords)
        try:
            container = op._container_of_one
        except AttributeError:  # its first call
            container = _container_of(op)
        compiled = container.current(op)
        if caller.x_is_inner:
            runtime = Runtime.of(x)._replace(x_is_inner=True)
            return compiled.run(bind(compiled.layout, x, (), None, keywords), runtime)
        return compiled.call(x, (), None, keywords)

    def traced_plan(self, op: Op, flags: Flags, *call: object) -> TracedPlan:
        from ..dynamo.steps import traced_plan_or_reason

        return traced_plan_or_reason(partial(_container_of(op).current, op), flags, *call)

    def explain(self, op: Op, args: tuple[object, ...], op_kwargs: OpKwargs | None, keywords: Keywords) -> Explanation:
        if not args and op_kwargs is None and not keywords:
            return explain_last(_container_of(op).compiled)
        return _explain(op, *args, op_kwargs=op_kwargs, **keywords)


def _explain(op: Op, x: object = None, *extra: object, op_kwargs: OpKwargs | None, **keywords: object) -> Explanation:
    compiled, runtime = _container_of(op).current(op), Runtime.of(x)
    if isinstance(op_kwargs, Mapping):  # which may address the op itself, not its view
        op_kwargs = {0 if key is op else key: values for key, values in op_kwargs.items()}
    call = bind(compiled.layout, x, extra, op_kwargs, keywords)
    return compiled.explain(call, runtime, checks=not input_may_change(op))


def _container_of(op: Op) -> ContainerOfOne:
    if not hasattr(op, "_container_of_one"):
        object.__setattr__(op, "_container_of_one", ContainerOfOne())
    container: ContainerOfOne = op._container_of_one
    return container


def _view(op: Op) -> Op:
    view: Op = object.__new__(type(op))
    object.__setattr__(view, "__dict__", op.__dict__)
    return view
