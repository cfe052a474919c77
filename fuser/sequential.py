"""The container: binds arguments to ops, finds the plan for the call, runs it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .compiler.binding import BoundArguments, OpKwargs, bind
from .compiler.flatten import Container, FlatContainer
from .compiler.graph import OpGraph
from .compiler.plan import Plan, compile_plan
from .compiler.recent import Recent
from .compiler.registry import registry
from .config import active_config, constant
from .edits import children_changed, tell_of_edits
from .errors import ArgumentError
from .explain.dry_run import Shape, explain_plan
from .explain.explanation import Explanation
from .op import Op
from .overrides import is_hooked
from .parametrized import foreseen
from .replay.calls import CapturedCall, call_key, start_capture
from .replay.guards import UNSUPPORTED, GuardedCache
from .replay.program import aligned
from .runtime.autograd import Runtime, run_alone

_MANY_PLANS = 64


class _Compiled:
    """What a container keeps between calls: layout, plans, captured calls, and what ``explain()`` needs of the last.

    All of it is for one structure and for the fusions of one time. After that there is a new object, so that a thread
    which is still in an earlier call files nothing among the plans of later ones.
    """

    def __init__(self, layout: FlatContainer, last: _Last | None = None) -> None:
        self.layout, self.last, self.version = layout, last, registry.version
        self.plans: Recent[tuple[Any, ...], Plan] = Recent(_MANY_PLANS)
        self.changes = 0  # of the ops when the plans were made
        self.captured: GuardedCache[CapturedCall] = GuardedCache()

    def run(self, call: BoundArguments, runtime: Runtime) -> Any:
        key = call_key(self.layout, call, runtime)
        if key is None:
            return self.note(call, runtime)(call.values, runtime)
        entry, addresses = self.captured.entry(*key), list(map(Tensor.data_ptr, key.pool))
        state = entry.state
        if state is UNSUPPORTED or not aligned(addresses):
            return self.note(call, runtime)(call.values, runtime)
        if type(state) is CapturedCall:
            if state.plan.buffers and state.overlaps(key.pool, addresses):
                return self.note(call, runtime)(call.values, runtime)
            self.last = state.last or _Last.of(state.plan, call, runtime)
            return state.run(key.pool, addresses, key.rows)
        plan = self.note(call, runtime)
        session = start_capture(entry, plan, key, len(call.values))
        result = plan(call.values, runtime, session)
        if session is not None:
            session.finish(self.last)
        return result

    def note(self, call: BoundArguments, runtime: Runtime) -> Plan:
        """The plan for this call, which is the last one from now on."""
        plan = self.plan(call, runtime)
        self.last = _Last.of(plan, call, runtime)
        return plan

    def plan(self, call: BoundArguments, runtime: Runtime) -> Plan:
        """The plan for this signature, compiled at the first call that has it."""
        switches, key, changes = active_config(), call.key(), 0
        for op in self.layout.ops:
            known = op if not op._modules else foreseen(op)
            key += (known.decision_key(), is_hooked(op))
            changes += op.changes
        if changes != self.changes:  # conditions may have read what has been assigned since
            self.plans, self.changes = Recent(_MANY_PLANS), changes
        signature, plans = (*key, runtime, switches.token), self.plans
        plan = plans.young.get(signature) or plans.from_old(signature)
        if plan is None:
            plan = compile_plan(OpGraph.of(self.layout, call), registry, switches)
            plans.add(signature, plan)
        return plan


class _Last(NamedTuple):
    """The last call: of each value the shape, or what is no tensor. Holds no tensors."""

    plan: Plan
    seen: list[Any]
    runtime: Runtime

    @classmethod
    def of(cls, plan: Plan, call: BoundArguments, runtime: Runtime) -> _Last:
        # a nested tensor, which a module may take, has no shape to keep
        seen = [(() if v.is_nested else v.shape) if isinstance(v, Tensor) else v for v in call.values]
        return cls(plan, seen, runtime)

    def explain(self) -> Explanation:
        infos = self.plan.graph.inputs()
        shapes = [Shape(tuple(s), *i[:3]) if i else Shape.of(s) for s, i in zip(self.seen, infos, strict=True)]
        return explain_plan(self.plan, shapes, self.runtime)


class StateFormat(NamedTuple):
    """What containers load besides their own names and layout, and what they save."""

    read: Callable[[Sequential, dict[str, Any], str, dict[str, Any]], list[str]]
    """Given a container, a state dict to rewrite, the container's prefix and metadata in it; returns what is wrong."""
    write: Callable[[Sequential, dict[str, Any], str], None]
    """Notes in a state dict what it does not say by itself."""


_state_formats: list[StateFormat] = []


def add_state_format(form: StateFormat) -> None:
    """Lets all containers read and write it."""
    _state_formats.append(form)


class Sequential(Container):
    """``nn.Sequential`` of ops, fused where a fusion matches; any other module runs as it is, with ``x`` only.

    >>> import torch, fusible
    >>> model = fusible.Sequential(fusible.Linear(4, 8), fusible.SwiGLU(), fusible.Linear(4, 4))
    >>> model(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """

    _compiled: _Compiled | None

    def __init__(self, *modules: Any) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            modules = (OrderedDict(modules[0]),)
        super().__init__(*modules)
        self._compiled = None

    def __setattr__(self, name: str, value: Any) -> None:
        is_child = isinstance(value, nn.Module) or name in self.__dict__.get("_modules", ())
        super().__setattr__(name, value)
        if is_child:
            children_changed(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        children_changed(self)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As of any module."""
        super().add_module(name, module)
        children_changed(self)

    def forget_children(self) -> None:
        """Drops what is kept of earlier calls: somebody edits the container, or one inside it."""
        self._compiled = None

    def forward(  # type: ignore[override]
        self, x: Tensor, *extra_inputs: Any, op_kwargs: OpKwargs | None = None, **shared: Any
    ) -> Any:
        """Runs the ops.

        Args:
            x: the input of the first op.
            *extra_inputs: the required tensor keywords that nothing else gives, in op order, then signature order.
            op_kwargs: for an op (itself, its index, or its name) its keywords.
            **shared: keywords for every op that takes them and did not get them by ``op_kwargs``.

        Returns:
            The output of the last op; with extra outputs that no op reads, a tuple of it and them, in op order.

        Raises:
            ArgumentError: an argument does not fit; it is a ``TypeError`` and a ``ValueError``. Nothing has run, but
                where it does not fit what a module gives that is no op: then no op behind that module has.
            IndexError: an int key of ``op_kwargs`` is out of range.
            RefusedError: under ``config(strict=True)``, where a fusion is refused.
        """
        if torch.compiler.is_dynamo_compiling():
            from .dynamo.frontend import run_container

            return run_container(self, x, extra_inputs, op_kwargs, shared)
        compiled, runtime = self._current(), Runtime.of(x)
        call = bind(compiled.layout, x, extra_inputs, op_kwargs, shared)
        return compiled.run(call, runtime)

    container_forward = forward

    def explain(
        self, x: Any = None, *extra_inputs: Any, op_kwargs: OpKwargs | None = None, **shared: Any
    ) -> Explanation:
        """What a call with these arguments runs, and why each fusion and each kernel was or was not taken.

        Takes what :meth:`forward` takes, or nothing, for the last call. Runs nothing.

        Raises:
            ArgumentError: no arguments, and no call yet; arguments, but no ``x``; else as :meth:`forward`.
        """
        if x is None and not extra_inputs and not op_kwargs and not shared:
            last = self._last_call()
            if last is None:
                raise ArgumentError(
                    "explain: there was no call yet; give it what you would give forward (edits forget the last call)"
                )
            return last.explain()
        compiled, runtime = self._current(), Runtime.of(x)
        call = bind(compiled.layout, x, extra_inputs, op_kwargs, shared)
        plan = compiled.plan(call, runtime)
        plan.check(call.values, runtime)
        return explain_plan(plan, [Shape.of(v) for v in call.values], runtime)

    @property
    def was_called(self) -> bool:
        """Whether :meth:`explain` has a last call to tell about."""
        return self._last_call() is not None

    def _last_call(self) -> _Last | None:
        return None if self._compiled is None else self._compiled.last

    @constant
    def _program(self, call: Any, likes: Any, names: Any, switches: Any, constants: Any) -> Any:
        from .dynamo.steps import answer, of_container

        return answer(of_container, switches, self, call, likes, names)

    def _current(self) -> _Compiled:
        """What is kept for the structure and the fusions of now."""
        compiled = self._compiled
        if compiled is None or not compiled.layout.is_current(self):
            compiled = self._compiled = _Compiled(FlatContainer(self))
            for module in (self, *compiled.layout.opened()):
                tell_of_edits(module, self)
        elif compiled.version != registry.version:
            compiled = self._compiled = _Compiled(compiled.layout, compiled.last)
        return compiled

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module: the parameters as they are."""
        state = super().state_dict(*args, **kwargs)
        for form in _state_formats:
            form.write(self, state, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for form in _state_formats:
            for wrong in form.read(self, state_dict, prefix, args[0]):
                args[-1].append(f"{prefix.removesuffix('.') or type(self).__name__}: {wrong}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._compiled = None  # it has ops of its own
        return replica

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}

    def __add__(self, other: nn.Sequential) -> Sequential:
        if not isinstance(other, nn.Sequential):
            raise ValueError(f"add operator supports only objects of Sequential class, but {type(other)} is given.")
        return Sequential(*self, *other)

    def __mul__(self, times: int) -> Sequential:
        return Sequential(*super().__mul__(times))


class _Standalone:
    """Runs an op that no container holds."""

    def run(self, op: Op, x: Tensor, keywords: dict[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            from .dynamo.frontend import run_op

            return run_op(op, x, keywords)
        return run_alone(op, x, keywords)

    def program(self, op: Op, call: Any, likes: Any, names: Any, switches: Any) -> Any:
        from .dynamo.steps import answer, of_op

        return answer(of_op, switches, op, call, likes, names)

    def explain(self, op: Op, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Explanation:
        return Sequential(op).explain(*arguments, **keywords)


Op._standalone = _Standalone()
