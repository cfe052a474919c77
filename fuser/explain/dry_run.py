"""Dry runs: finds out what a call runs, by running its plan on tensors without data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..compiler.graph import OpGraph
from ..compiler.near_miss import covered, near_misses
from ..compiler.plan import Plan
from ..compiler.registry import registry
from ..compiler.step import Step
from ..contract import tracing as trace
from ..contract.errors import RefusedError
from ..contract.op import Op
from ..contract.overrides import overrides_forward, patched_half
from ..contract.parametrized import AnyOp, foreseen_spec, view_of
from ..contract.spec import TensorSpec
from ..contract.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    storage_id,
)
from ..runtime.autograd import Runtime, differentiable
from ..runtime.buffers import SlotValues, works_in_place
from ..runtime.call import call_bwd, call_fwd, evaluate
from ..runtime.residuals import pack, tensors_of, unpack
from .explanation import ExplainedFusion, ExplainedStep, Explanation, KernelReport, StandIn


def explain_plan(plan: Plan, arguments: SlotValues, runtime: Runtime) -> Explanation:
    """Explains a plan for these arguments, with a :class:`TensorSpec` in place of each tensor."""
    steps = tuple(_explain_steps(plan, arguments, runtime))
    fusions = [
        _explained(plan.graph, d.fusion.name, d.match.nodes.values(), d.taken, d.reason)
        for d in plan.decisions
        if not covered(d, plan.decisions)
    ]
    enabled = [fusion for fusion in registry if fusion.name not in plan.config.disable_fusions]
    missed = [
        _explained(plan.graph, *miss[:2], False, miss.reason)
        for miss in near_misses(plan.graph, enabled, plan.decisions)
    ]
    return Explanation(steps, tuple(fusions), math.prod(arguments[0].shape[:-1]), plan.graph, tuple(missed))


def _explained(graph: OpGraph, name: str, nodes: Iterable[str], taken: bool, reason: str) -> ExplainedFusion:
    entries = [entry for node in nodes if (entry := graph.entry(node))]
    labels, ops = tuple(entry.label for entry in entries), tuple(dict.fromkeys(entry.index for entry in entries))
    return ExplainedFusion(name, ops, labels, taken, reason)


def _explain_steps(plan: Plan, arguments: SlotValues, runtime: Runtime) -> Iterator[ExplainedStep]:
    kept: dict[int, Tensor] = {}
    behind = "its input is not known without data"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(runtime.grad_enabled):
        values: SlotValues | None = [each.empty() if isinstance(each, TensorSpec) else each for each in arguments]
        for step in plan.steps:
            labels, ops = (entry.label for entry in step.entries), dict.fromkeys(entry.index for entry in step.entries)
            row = ExplainedStep(step.name, tuple(ops), tuple(labels), notes=_notes_of_extras(plan.graph, step))
            if values is None:
                yield _unknown(row, KernelReport(reason=behind), runtime)
            elif isinstance(step.module, Op):
                try:
                    yield _explain_op(row, step, step.module, values, runtime, mode, kept)
                except Exception as error:
                    why = _unexplained(step.module, error)
                    if why is None:
                        raise
                    values = None
                    if isinstance(error, DynamicOutputShapeException):
                        behind = f"its shapes depend on data: on what {step.entries[-1]} gives"
                    yield _unknown(row, KernelReport("?", why), runtime)
            else:
                notes = _notes_of_copy(step, values)
                values = _run_module(step.module, step.x, values, mode)
                reason = step.module.reason if isinstance(step.module, StandIn) else ""
                report = KernelReport("module", reason or "not an Op: runs unchanged")
                if values is None:
                    yield _unknown(replace(row, notes=notes), report, runtime)
                else:
                    trains, shape = runtime.grad_enabled and values[-1].requires_grad, tuple(values[-1].shape)
                    yield replace(row, forward=report, backward=report if trains else None, shape=shape, notes=notes)


def _unknown(row: ExplainedStep, report: KernelReport, runtime: Runtime) -> ExplainedStep:
    """A step that cannot be run; its backward may be needed if gradients are on."""
    backward = KernelReport("?", report.reason) if runtime.grad_enabled else None
    return replace(row, forward=report, backward=backward)


class _OverriddenForwardError(Exception):
    """Calling the op does something other than running its halves."""


def _unexplained(op: Op, error: Exception) -> str | None:
    """The reason why an op can only be explained by calling it; None if it is a real error."""
    if isinstance(error, DynamicOutputShapeException):
        return "the shape of its output depends on data"
    if isinstance(error, DataDependentOutputException):
        return "it reads values, so it cannot run without data"
    if isinstance(error, _OverriddenForwardError):
        return "it has a forward of its own, which may do anything"
    return "its hooks may change what it is given" if op._forward_pre_hooks else None


def _explain_op(
    row: ExplainedStep,
    step: Step,
    op: Op,
    values: SlotValues,
    runtime: Runtime,
    mode: FakeTensorMode,
    kept: dict[int, Tensor],
) -> ExplainedStep:
    if overrides_forward(op):
        raise _OverriddenForwardError
    x, keywords = values[step.x], {name: values[slot] for name, slot in step.reads}
    for parameter in op.parameters():  # alive for as long as their storages are compared, or an address comes back
        kept |= {storage_id(p): p for p in (parameter, mode.from_tensor(parameter))}
    op = view_of(_apart(op), lambda part, name: foreseen_spec(part, name).empty())  # computes nothing
    named = differentiable(op, x, keywords) if runtime.grad_enabled else {}
    needs = frozenset(name for name, tensor in named.items() if tensor.requires_grad)
    with trace.recording() as seen, torch.no_grad():
        inner = step.x_is_inner or runtime.x_is_inner
        outputs, saved = call_fwd(op, x, keywords, needs, runtime.autocast_dtype, inner)
    kept |= {storage_id(t): t for t in seen.parameters}
    new = {storage_id(t): t for t in tensors_of(saved) if needs and storage_id(t) not in kept}
    kept |= new
    backward, notes = _explain_backward(op, saved, outputs, [n for n in named if n in needs], runtime)
    values.extend(y.detach().requires_grad_(bool(needs) and y.is_floating_point()) for y in outputs)
    return replace(
        row,
        forward=KernelReport.of(seen.calls),
        backward=backward,
        shape=tuple(outputs[0].shape),
        saved_bytes=sum(t.untyped_storage().nbytes() for t in new.values()),
        notes=(*row.notes, *dict.fromkeys([*seen.notes, *notes])),
    )


def _explain_backward(
    op: Op, saved: object, outputs: Sequence[Tensor], wanted: Sequence[str], runtime: Runtime
) -> tuple[KernelReport | None, list[str]]:
    """The report of an op's backward, and remarks; None if no gradient is wanted, or autograd does not see the op.

    Raises:
        RefusedError: a kernel is refused under ``config(strict=True)``.
    """
    if not wanted or (op.promises.passes_x_on and patched_half(op) is None):
        return None, []
    kept, lent, apart, rest = pack(saved)
    try:
        with trace.recording() as seen, torch.no_grad(), _without_autocast(outputs[0].device, runtime):
            joined = [each.source.joined(each.tensors) for each in apart]
            douts = tuple([torch.empty_like(y) for y in outputs])
            grads = call_bwd(op, unpack(rest, kept, lent, joined), douts, frozenset(wanted))
            for name in wanted:
                evaluate(grads[name])
    except RefusedError:
        raise
    except DataDependentOutputException:
        return KernelReport("?", "its backward reads values, so it cannot run without data"), []
    except Exception as error:  # whatever the code of an op does with tensors that hold no data
        line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return KernelReport("?", f"its backward cannot run without data: {line}"), []
    return KernelReport.of(seen.calls), seen.notes


def _apart(op: AnyOp) -> AnyOp:
    """A copy for the dry run, which takes the attributes that ``fwd`` and ``bwd`` assign; everything else is shared."""
    copy: AnyOp = object.__new__(type(op))
    held = {kind: dict(vars(op)[kind]) for kind in ("_parameters", "_buffers", "_modules")}
    object.__setattr__(copy, "__dict__", {**vars(op), **held})
    return copy


def _without_autocast(device: torch.device, runtime: Runtime) -> AbstractContextManager[object]:
    """A context without autocast, in which a backward runs even if its forward used autocast."""
    return nullcontext() if runtime.autocast_dtype is None else torch.autocast(device.type, enabled=False)


def _notes_of_extras(graph: OpGraph, step: Step) -> tuple[str, ...]:
    """Notes on the readers of a step's extra outputs, except those that stay inside the step."""
    notes, inside = [], {entry.label for entry in step.entries}
    for entry, op in zip(step.entries, step.ops, strict=True):
        for name in op.extra_outputs if op else ():
            readers = [reader for reader, _, output in graph.readers(entry.label) if output == name]
            ends = [f"read by op {' and '.join(readers)}"] if readers else []
            returned = graph.returns(entry.label, name, bool(readers))
            ends += ["returned"] if returned else []
            if returned or not readers or not inside.issuperset(readers):
                notes.append(f"extra output {name!r}: {', '.join(ends) or 'neither read nor returned'}")
    return tuple(notes)


def _notes_of_copy(step: Step, values: SlotValues) -> tuple[str, ...]:
    """The note that an in-place module gets a copy of its input, and which extra output requires it."""
    x = values[step.x]
    if not isinstance(x, Tensor) or not works_in_place(step.module):
        return ()
    shared = [repr(extra.name) for extra in step.beside if storage_id(values[extra.slot]) == storage_id(x)]
    return (f"its input is copied: it works in place, and {' and '.join(shared)} shares that memory",) if shared else ()


def _run_module(module: nn.Module, x: int, values: SlotValues, mode: FakeTensorMode) -> SlotValues | None:
    """The values with the module's output, or None if it cannot run without data."""
    try:
        whole = _WithoutHooks(module)
        state: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in _tensors_once(whole)}
        with torch.no_grad():
            y = torch.func.functional_call(whole, state, (values[x],), tie_weights=False)
    except Exception:  # whatever a module of the user's does with tensors that hold no data
        return None
    trains = values[x].requires_grad or any(p.requires_grad for p in module.parameters())
    return [*values, y.detach().requires_grad_(trains)] if isinstance(y, Tensor) else None


def _tensors_once(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors by name. A tensor that a module has under two names is listed once, because the call would restore
    the second name's stand-in.
    """
    for prefix, inside in module.named_modules():
        for name, tensor in (inside._parameters | inside._buffers).items():
            if tensor is not None:
                yield f"{prefix}.{name}".removeprefix("."), tensor


class _WithoutHooks(nn.Module):
    """Runs a module without its hooks, which are user code meant for real calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: object) -> object:
        return self.module.forward(x)
