"""The state that a container keeps between calls and runs calls with: layout, plans, captured calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..compiler.binding import BoundArguments, bind
from ..compiler.flatten import FlatContainer
from ..compiler.graph import OpGraph
from ..compiler.plan import Plan, compile_plan
from ..compiler.recent import Recent
from ..compiler.registry import registry
from ..contract.config import active_config, keep_for_recomputation
from ..contract.errors import ArgumentError
from ..contract.op import Keywords, OpKwargs
from ..contract.overrides import is_hooked
from ..contract.parametrized import foreseen
from ..contract.spec import TensorSpec
from ..contract.torch_private import top_saved_tensors_hooks
from ..contract.tracing import has_no_data
from ..explain.dry_run import explain_plan
from ..explain.explanation import Explanation
from ..replay.calls import CapturedCall, CaptureSession, LastCall, call_key
from ..replay.guards import REPLAYED, GuardedCache, Refusal, described
from ..runtime.autograd import Runtime
from ..runtime.devices import current_stream
from .repeated_call import RepeatedCall, Run

_MANY_PLANS = 64


class CallCache:
    """A container's state between calls: layout, plans, captured calls, and the last call for ``explain()``.

    It is valid for one structure and one version of the registry. A change makes a new object, so a thread that is
    still in an earlier call stores nothing among later plans.
    """

    def __init__(self, layout: FlatContainer, last: LastCall | None = None) -> None:
        self.layout, self.last, self.version = layout, last, registry.version
        self.plans: Recent[tuple[object, ...], Plan] = Recent(_MANY_PLANS)
        self.decision_version = 0  # the sum of the ops' when the plans were made
        self.calls: GuardedCache[CapturedCall] = GuardedCache()
        self.repeated: RepeatedCall | None = None
        self.last_entry: tuple[int, int] | None = None  # the id of the capture or refusal last found, its rows

    def call(self, x: Tensor, extra: tuple[object, ...], op_kwargs: OpKwargs | None, shared: Keywords) -> object:
        """Binds the arguments, finds the plan, and runs it; a call like the last two runs at once."""
        if not torch.compiler.is_dynamo_compiling() and (not torch.is_grad_enabled() or top_saved_tensors_hooks(True)):
            keep_for_recomputation()
        repeated, is_simple = self.repeated, op_kwargs is None
        if repeated is not None and is_simple:
            values = repeated.values(x, extra, shared)
            if values is not None:
                self.last = repeated.last
                return repeated.run(values)
            self.repeated = None
        runtime, call = Runtime.of(x), bind(self.layout, x, extra, op_kwargs, shared)
        if x.device.type in current_stream:
            return self.run(call, runtime, [x, *extra, *shared.values()], [*shared] if is_simple else None)
        plan = self.plan(call, runtime)
        if not has_no_data(x):  # the sizes of a traced call may be symbols of a compiler
            self.last = LastCall.of(plan, call, runtime, "")
        return plan(call.values, runtime)

    def run(
        self, call: BoundArguments, runtime: Runtime, arguments: Sequence[object] = (), names: list[str] | None = None
    ) -> object:
        """Runs a call that is bound, or replays it.

        Args:
            arguments: the call's arguments, if a later call may repeat it; ``names``: the names of the last ones, which
                are keywords.
        """
        key = call_key(self.layout, call, runtime)
        if isinstance(key, Refusal):
            return self.note(call, runtime, key)(call.values, runtime)
        form, entry = self.calls.find(*key)
        if entry is None:
            plan = self.plan(call, runtime)
            last = self.last = LastCall.of(plan, call, runtime, REPLAYED)
            session = CaptureSession.of(form, plan, key, call.values)
            result = plan(call.values, runtime, session)
            if session is not None:
                session.finish(last)
            self.last = last._replace(replay=described(form[key.rows]))
            return result
        run: Run
        if isinstance(entry, Refusal):
            plan = self.plan(call, runtime)
            last = self.last = LastCall.of(plan, call, runtime, described(entry))
            if form[key.rows] is not entry or plan.passed is None:  # it may not hold for the next call
                return plan(call.values, runtime)
            run = partial(plan.run, runtime=runtime, checked=plan.checked(call.values, runtime))
            first = len(key.pool) - len(call.values)
        else:
            last = self.last = entry.last or LastCall.of(entry.plan, call, runtime, REPLAYED)
            run, first = partial(entry.run, rows=key.rows), 0
        before, self.last_entry = self.last_entry, (id(entry), key.rows)
        if names is not None and before == self.last_entry:
            self.repeated = RepeatedCall.of(self.layout, names, arguments, call.values, key, last, run, first)
        return run(key.pool[first:])

    def note(self, call: BoundArguments, runtime: Runtime, refusal: Refusal) -> Plan:
        """Finds the plan and records the call as the last one; ``refusal``: the reason why it is not replayed.

        A traced call is not recorded, as its sizes may be symbols of a compiler.
        """
        plan = self.plan(call, runtime)
        if not has_no_data(call.values[0]):
            self.last = LastCall.of(plan, call, runtime, described(refusal))
        return plan

    def explain(self, call: BoundArguments, runtime: Runtime, checks: bool = True) -> Explanation:
        """The explanation of a call; ``checks``: whether to raise if its arguments do not fit."""
        plan = self.plan(call, runtime)
        if checks:
            plan.check(call.values, runtime)
        arguments = [TensorSpec.of(v) if isinstance(v, Tensor) else v for v in call.values]
        return replace(explain_plan(plan, arguments, runtime), replay=self._replay(call, runtime, plan))

    def _replay(self, call: BoundArguments, runtime: Runtime, plan: Plan) -> str:
        """The text of an explanation about replays of such a call."""
        key = call_key(self.layout, call, runtime)
        if isinstance(key, Refusal) or plan.replay_refusal is not None:
            return described(key if isinstance(key, Refusal) else Refusal(plan.replay_refusal))
        return described(self.calls.find(*key)[1])

    def plan(self, call: BoundArguments, runtime: Runtime) -> Plan:
        """The plan for this signature, compiled at its first call."""
        config, key, version = active_config(), call.key(), 0
        for op in self.layout.ops:
            view = foreseen(op) if op._modules or op._forward_pre_hooks else op
            key += (view.decision_key(), is_hooked(op))
            version += op.decision_version
        if version != self.decision_version:  # conditions may have read attributes that were assigned since
            self.plans, self.decision_version = Recent(_MANY_PLANS), version
        signature, plans = (*key, runtime, config.token), self.plans
        if has_no_data(call.values[0]):
            signature = tuple(map(_in_numbers, signature))
        plan = plans.young.get(signature) or plans.from_old(signature)
        if plan is None:
            call.check_store_values(self.layout.entries)  # here alone: their classes stand in the signature
            plan = compile_plan(OpGraph.of(self.layout, call), registry, config)
            plans.add(signature, plan)
        return plan


def _in_numbers(value: object) -> object:
    """A signature with the sizes of parameters as plain ints, even if a compiler has made them symbolic."""
    if isinstance(value, tuple):
        return tuple(map(_in_numbers, value))
    return int(value) if isinstance(value, torch.SymInt) else value


def explain_last(cache: CallCache | None) -> Explanation:
    """The explanation of the last call.

    Raises:
        ArgumentError: there was none.
    """
    if cache is None or cache.last is None:
        raise ArgumentError("explain: no call yet; pass the arguments of forward (an edit forgets the last call)")
    plan, shapes, runtime, replay = cache.last
    specs = zip(plan.graph.inputs(), shapes, strict=True)
    arguments = [spec._replace(shape=tuple(shape)) if spec else shape for spec, shape in specs]
    return replace(explain_plan(plan, arguments, runtime), replay=replay)
