"""Plans: straight-line programs, one per call signature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..contract.config import Config
from ..contract.errors import ArgumentError, RefusedError
from ..contract.op import Keyword, Op
from ..contract.overrides import is_called_whole
from ..contract.parametrized import computes_parameters, foreseen
from ..contract.spec import TensorSpec, check_layout, shape_of
from ..contract.stored_values import check_stores_values
from ..contract.torch_private import profiler_enabled
from ..runtime.autograd import Runtime, StepCapture, refuse_transforms
from ..runtime.buffers import NamedValue, SlotValues, check_overlaps
from ..runtime.devices import current_stream
from . import legality
from .graph import OpGraph, X
from .registry import Decision, Registry
from .step import KeywordSlots, PartSlots, Step

_MANY_SHAPES = 1024


@dataclass(frozen=True)
class Plan:
    """Steps in order, the slots to return, and the decisions on fusions.

    Outputs of steps get consecutive slots, after those of the call's values.
    """

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    inputs: tuple[NamedValue, ...]
    buffers: tuple[NamedValue, ...]
    decisions: tuple[Decision, ...]
    graph: OpGraph
    config: Config  # kept, so that the same switches are this object again: it stands in the keys of caches
    passed: dict[tuple[torch.Size, ...], int] | None  # shapes that have been checked; None where they do not say enough
    replay_refusal: str | None

    def __call__(self, values: SlotValues, runtime: Runtime, session: StepCapture | None = None) -> Any:
        """Checks everything that can be checked beforehand, then runs."""
        return self.run(values, runtime, self.checked(values, runtime), session)

    def run(self, values: SlotValues, runtime: Runtime, checked: int, session: StepCapture | None = None) -> Any:
        """Runs the steps, of which the first ``checked`` ones are settled."""
        profiled = profiler_enabled()
        for i, step in enumerate(self.steps):
            if i >= checked:
                checked = self._check_run(i, values, runtime)
            elif step.reads_step_outputs:
                step.check(TensorSpec.of(values[step.x]), values, runtime, {})
            if profiled:
                with torch.profiler.record_function(f"fusible::{step.name}"):
                    step.run(values, runtime, session)
            else:
                step.run(values, runtime, session)
        return values[self.results[0]] if len(self.results) == 1 else (*map(values.__getitem__, self.results),)

    def checked(self, values: SlotValues, runtime: Runtime) -> int:
        """The result of :meth:`check`, cached by the shapes of the values."""
        passed = self.passed
        if passed is None:
            return self.check(values, runtime)
        try:
            shapes = (*map(shape_of, values),)
            checked = passed.get(shapes)
        except (RuntimeError, TypeError):  # a nested tensor has none, and sizes of a compiler may be symbols
            return self.check(values, runtime)
        if checked is None:
            checked = self.check(values, runtime)
            if len(passed) >= _MANY_SHAPES:
                passed.clear()
            passed[shapes] = checked
        return checked

    def check(self, values: SlotValues, runtime: Runtime) -> int:
        """Checks everything that can be checked before anything runs; returns the number of steps that are settled."""
        refuse_transforms([step.module for step in self.steps])
        if self.buffers:
            check_overlaps(self.buffers, self.inputs, values, self._parameters())
        if not self.steps:
            return 0
        checked = self._check_run(0, values, runtime)
        for step in self.steps[checked:]:
            step.check(None, values, runtime, {})
        return checked

    def _check_run(self, first: int, values: SlotValues, runtime: Runtime) -> int:
        """Checks the steps from ``first`` on, as far as specs are known; returns the index of the next step to check.

        If an op between other modules refuses its arguments, no op of its run has run yet.
        """
        entry, x = self.steps[first].entries[0], values[self.steps[first].x]
        if self.steps[first].ops[0] is None:
            return first + 1
        if first and not isinstance(x, Tensor):
            raise ArgumentError(f"{entry}: x: expected a tensor, got a {type(x).__name__}")
        if first:
            check_stores_values("x", x, str(entry))
        spec: TensorSpec | None = TensorSpec.of(x)
        extras: dict[str, TensorSpec] = {}
        end = first
        for step in self.steps[first:]:
            spec, end = step.check(spec, values, runtime, extras), end + 1
            if spec is None:
                break
        return end

    def _parameters(self) -> Iterator[Tensor]:
        for step in self.steps:
            yield from step.module.parameters()


def compile_plan(graph: OpGraph, registry: Registry, config: Config) -> Plan:
    """Chooses the fusions and lays out the steps.

    Raises:
        ArgumentError: an op gets a tensor of an unsupported layout.
        RefusedError: under ``config(strict=True)``, if a fusion whose shape fits was refused.
    """
    _check_layouts(graph)
    decisions = tuple(registry.decide(graph, config))
    refused = [d for d in decisions if not d.taken and not d.benign]
    if config.strict and refused:
        lines = (f"{d.fusion.name} over {' '.join(d.match.nodes.values())}: {d.reason}" for d in refused)
        raise RefusedError("strict: a fusion was refused. " + "; ".join(lines))
    builder = _Builder(graph, [d for d in decisions if d.taken])
    steps = tuple(builder.steps())
    results = builder.results()
    read = {slot: name for name, slot, keyword in reversed([*_keywords(steps)]) if not keyword.buffer} | {0: "x"}
    inputs = tuple(NamedValue(read[slot], slot) for slot in sorted(read))
    buffers = tuple(NamedValue(name, slot) for name, slot, keyword in _keywords(steps) if keyword.buffer)
    by_values = checks_values(graph, config)
    passed: dict[tuple[torch.Size, ...], int] | None = None if buffers or by_values else {}
    why = _replay_refusal(steps, by_values)
    return Plan(_with_lifetimes(steps, results), results, inputs, buffers, decisions, graph, config, passed, why)


def _replay_refusal(steps: Sequence[Step], by_values: bool) -> str | None:
    """The reason why calls of a plan cannot be replayed, or None."""
    if by_values:
        return "its checks look at values of tensors"
    return next((step.replay_refusal for step in steps if step.replay_refusal is not None), None)


def _check_layouts(graph: OpGraph) -> None:
    """Checks the layouts of tensors that a call gives to ops; they are the same for all calls of a plan."""
    for node in graph.entries():
        entry, op = graph.entry(node), graph.op(node)
        for port, (source, _) in graph.sources(node).items() if op else ():
            spec = graph.nx.nodes[source].get("spec")
            if spec is not None:
                check_layout(f"{entry}: {port}", spec.layout, op.layouts)  # type: ignore[union-attr]


def checks_values(graph: OpGraph, config: Config) -> bool:
    """Whether a check may read values: those on the host, or with ``debug`` all, with a wait."""
    if config.debug or any(op.promises.values_checked is None for node in graph.entries() if (op := graph.op(node))):
        return True
    specs = graph.inputs()
    if all([spec is not None and spec.device.type in current_stream for spec in specs]):
        return False
    return None in specs or any(_checks_values_on_host(graph, node) for node in graph.entries())


def _checks_values_on_host(graph: OpGraph, node: str) -> bool:
    """Whether the op may check values of a call's arguments, rather than those of an earlier op's outputs."""
    op = graph.op(node)
    if op is None:
        return False
    checked = op.promises.values_checked
    if checked is None:
        return True
    sources = graph.sources(node)
    ports_of_ops = {port for port, (source, _) in sources.items() if graph.entry(source) is not None}
    return not checked <= ports_of_ops


def _with_lifetimes(steps: tuple[Step, ...], results: tuple[int, ...]) -> tuple[Step, ...]:
    """Notes the last step that reads each output, which frees it, and the extra outputs alive beside modules."""
    last = {slot: i for i, step in enumerate(steps) for slot in (*step.outputs, step.x, *(s for _, s in step.reads))}
    last |= dict.fromkeys(results, len(steps))
    outputs: list[int] = []
    extras: list[NamedValue] = []
    lasting = []
    for i, step in enumerate(steps):
        outputs += step.outputs
        last_uses = tuple([slot for slot in outputs if last[slot] == i])
        beside = [extra for extra in extras if last[extra.slot] > i] if not isinstance(step.module, Op) else ()
        lasting.append(replace(step, last_uses=last_uses, beside=tuple(beside)))
        names = step.module.extra_outputs if isinstance(step.module, Op) else ()
        extras += map(NamedValue, names, step.outputs[1:])
    return tuple(lasting)


def _keywords(steps: tuple[Step, ...]) -> Iterator[tuple[str, int, Keyword]]:
    """The name in errors, the slot and the declaration of everything that a call gives."""
    outputs = {slot for step in steps for slot in step.outputs}
    for entry, op, reads in (each for s in steps for each in zip(s.entries, s.ops, s.entry_reads, strict=True)):
        for name, slot in reads:
            if op and slot is not None and slot not in outputs:
                yield f"{entry}: {name!r}", slot, op.keywords[name]


class _Builder:
    """Turns nodes into steps, and (node, output) into slots."""

    def __init__(self, graph: OpGraph, taken: list[Decision]) -> None:
        self.graph = graph
        self.decision_of = {node: d for d in taken for node in d.match.nodes.values()}
        inputs = [n for n in graph.nx if graph.entry(n) is None]
        self.slots: dict[tuple[str, str], int] = {(n, "y"): slot for slot, n in enumerate(inputs)}
        self.input_count = self.next = len(inputs)
        self.outer = {(X, "y")}  # the x of the call, and what passes it on

    def steps(self) -> Iterator[Step]:
        for nodes in self._order():
            decision = self.decision_of.get(nodes[0])
            yield self._fused(decision, nodes) if decision else self._single(nodes[0])

    def results(self) -> tuple[int, ...]:
        """The slots of the main output and of the extra outputs that are returned."""
        entries = self.graph.entries()
        results = [self.slots[entries[-1] if entries else X, "y"]]
        for node in entries:
            op, read = self.graph.op(node), {output for _, _, output in self.graph.readers(node)}
            names = [n for n in op.extra_outputs if self.graph.returns(node, n, n in read)] if op else ()
            results += [self.slots[node, name] for name in names]
        return tuple(results)

    def _order(self) -> list[list[str]]:
        """The nodes of each step, in execution order; legality guarantees that a fusion's ops are consecutive."""
        steps: dict[object, list[str]] = {}
        for node in self.graph.entries():
            steps.setdefault(id(self.decision_of[node]) if node in self.decision_of else node, []).append(node)
        return list(steps.values())

    def _single(self, node: str) -> Step:
        entry = self.graph.entry(node)
        assert entry is not None
        module, op = entry.module, entry.op
        assert module is not None
        sources = self.graph.sources(node)
        source = sources.pop("x")
        reads = tuple((port, self.slots[source]) for port, source in sources.items())
        x, inner = self.slots[source], source not in self.outer
        direct = op if op is not None and (entry.stands_alone or not is_called_whole(op)) else None
        if not inner and direct is not None and direct.promises.passes_x_on:
            self.outer.add((node, "y"))
        outputs = self._allocate_slots([(node, "y"), *((node, name) for name in (op.extra_outputs if op else ()))])
        names = None if direct is None else foreseen(direct).input_names()
        late, parametrized = self._reads_step_outputs(reads), op is not None and computes_parameters(op)
        return Step(module, (entry,), (op,), ("",), (reads,), reads, x, outputs, names, late, parametrized, inner)

    def _fused(self, decision: Decision, nodes: list[str]) -> Step:
        fused, match = decision.fused, decision.match
        assert fused is not None
        source = legality.source_of_x(match)
        reads = tuple((name, self.slots[source]) for name, source in decision.reads.items())
        entries = tuple(entry for n in nodes if (entry := self.graph.entry(n)))
        ops, entry_reads = tuple(map(self.graph.op, nodes)), tuple(self._reads_of(n) for n in nodes)
        makers = {name: n for n, op in zip(nodes, ops, strict=True) for name in (op.extra_outputs if op else ())}
        extras = [(makers[name], name) for name in fused.extra_outputs]
        outputs = self._allocate_slots([(legality.last(match), "y"), *extras])
        role_of = {node: role for role, node in match.nodes.items()}
        roles, x, names = tuple([role_of[n] for n in nodes]), self.slots[source], foreseen(fused).input_names()
        late, parametrized, inner = (
            self._reads_step_outputs(reads),
            computes_parameters(fused),
            source not in self.outer,
        )
        return Step(fused, entries, ops, roles, entry_reads, reads, x, outputs, names, late, parametrized, inner)

    def _reads_step_outputs(self, reads: KeywordSlots) -> bool:
        return any(slot >= self.input_count for _, slot in reads)

    def _reads_of(self, node: str) -> PartSlots:
        """The slots that an op inside a fused op reads."""
        sources = self.graph.sources(node).items()
        return tuple((port, self.slots.get(source)) for port, source in sources if port != "x")

    def _allocate_slots(self, outputs: list[tuple[str, str]]) -> tuple[int, ...]:
        slots = tuple(range(self.next, self.next + len(outputs)))
        self.slots.update(zip(outputs, slots, strict=True))
        self.next += len(outputs)
        return slots
