"""Plans: the straight-line program for one call signature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import legality
from .autograd import Runtime, Watch, check, refuse_transforms, run, run_computing
from .buffers import NamedValue, check_overlaps
from .errors import ArgumentError, RefusedError
from .fusion import Decision, Registry
from .graph import OpGraph, X
from .layout import Leaf
from .op import Keyword, Op, Spec, computes_parameters
from .own_code import has_own_forward, is_called_whole, patched_half
from .settings import Config

Reads = tuple[tuple[str, int], ...]  # (keyword, slot)
_MANY_SHAPES = 1024


@dataclass(frozen=True)
class Step:
    """One thing to run: an op, a fused op, or a module that is not an op. Slots are places in the list of values."""

    module: nn.Module
    leaves: tuple[Leaf, ...]
    ops: tuple[Op | None, ...]  # of the leaves
    leaf_reads: tuple[Reads | None, ...]  # None where an op reads what is made inside the step
    reads: Reads
    x: int
    outputs: tuple[int, ...]
    input_names: tuple[str, ...] | None  # of the op; None where the module must be called as such
    late: bool  # reads what an earlier step computes, besides x
    computes: bool  # some of its parameters
    dead: tuple[int, ...] = ()  # slots of outputs that nothing reads any more

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def check(self, x: Spec | None, values: list[Any], runtime: Runtime) -> Spec | None:
        """Lets every op that the step stands for check its own arguments; returns what the step will give, if known."""
        whole = self.input_names is None
        for i, (op, reads) in enumerate(zip(self.ops, self.leaf_reads)):  # noqa: B905
            if op is None or x is None or reads is None or (whole and self._input_may_change()):
                return None
            try:
                x = check(op, x, {name: values[slot] for name, slot in reads}, runtime)
            except ArgumentError as error:
                raise error.located(str(self.leaves[i])) from None
        return None if whole and self.module._forward_hooks else x  # hooks may give out something else

    def _input_may_change(self) -> bool:
        """Whether an op that is called whole may be given another x than the call's, which it then checks itself."""
        return bool(self.module._forward_pre_hooks) or has_own_forward(self.module)

    def check_late(self, values: list[Any], runtime: Runtime) -> None:
        """:meth:`check`, once its input has been computed."""
        if isinstance(self.module, Op):
            x = values[self.x]
            if not isinstance(x, Tensor):
                raise ArgumentError(f"{self.leaves[0]}: x: expected a tensor, got a {type(x).__name__}")
            self.check(Spec.of(x), values, runtime)

    @property
    def is_replayable(self) -> bool:
        """Whether all ops that it stands for are."""
        return self.input_names is not None and all(
            op.replayable and not patched_half(op) for op in self.module.modules() if isinstance(op, Op)
        )

    def run(self, values: list[Any], runtime: Runtime, watch: Watch | None = None) -> None:
        """Runs on the values so far, and adds its outputs to them."""
        module, x, keywords = self.module, values[self.x], {name: values[slot] for name, slot in self.reads}
        if self.input_names is not None:
            how = run_computing if self.computes else run
            values += how(module, x, keywords, runtime, self.input_names, watch)  # type: ignore[arg-type]
            if watch is not None:
                watch.made(values[-len(self.outputs) :])
        elif isinstance(module, Op):
            values.extend(self._called(module, x, keywords))
        else:
            values.append(module(x))
        for slot in self.dead:
            values[slot] = None

    def _called(self, op: Op, x: Any, keywords: dict[str, Any]) -> Any:
        try:
            result = op(x, **keywords)
        except ArgumentError as error:
            raise ArgumentError(f"{self.leaves[0]}: {str(error).removeprefix(f'{self.name}: ')}") from None
        return result if op.extra_outputs else (result,)


@dataclass(frozen=True)
class Plan:
    """Steps in order, the slots to return, and what was decided on the way.

    Steps put their outputs into slots one after the other, from the number of the call's values on.
    """

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    inputs: tuple[NamedValue, ...]
    buffers: tuple[NamedValue, ...]
    decisions: tuple[Decision, ...]
    graph: OpGraph
    config: Config  # kept, so that the same switches are this object again: it stands in the keys of caches
    passed: dict[tuple[torch.Size, ...], int] | None  # shapes that have been checked; None where they do not say enough
    is_replayable: bool

    def __call__(self, values: list[Any], runtime: Runtime, watch: Watch | None = None) -> Any:
        """Checks everything that can be checked beforehand, then runs."""
        checked = self._checked(values, runtime)
        profiled = torch._C._autograd._profiler_enabled()
        for i, step in enumerate(self.steps):
            if i >= checked:
                step.check_late(values, runtime)
            if profiled:
                with torch.profiler.record_function(f"fusible::{step.name}"):
                    step.run(values, runtime, watch)
            else:
                step.run(values, runtime, watch)
        return values[self.results[0]] if len(self.results) == 1 else tuple(values[slot] for slot in self.results)

    def _checked(self, values: list[Any], runtime: Runtime) -> int:
        """:meth:`check`, or what it said of these shapes before, where they are all that it looks at."""
        if self.passed is None:
            return self.check(values, runtime)
        shapes = tuple([value.shape for value in values])
        checked = self.passed.get(shapes)
        if checked is None:
            checked = self.check(values, runtime)
            if len(self.passed) >= _MANY_SHAPES:
                self.passed.clear()
            self.passed[shapes] = checked
        return checked

    def check(self, values: list[Any], runtime: Runtime) -> int:
        """Checks the arguments of all steps whose input is known beforehand; returns how many steps that are."""
        refuse_transforms([step.module for step in self.steps])
        if self.buffers:
            check_overlaps(self.buffers, self.inputs, values, self._parameters())
        spec: Spec | None = Spec.of(values[0])
        for i, step in enumerate(self.steps):
            if step.late:
                return i
            spec = step.check(spec, values, runtime)
            if spec is None:
                return i + 1
        return len(self.steps)

    def _parameters(self) -> Iterator[Tensor]:
        for step in self.steps:
            yield from step.module.parameters()


def compile_plan(graph: OpGraph, registry: Registry, config: Config) -> Plan:
    """Chooses the fusions and lays out the steps.

    Raises:
        RefusedError: under ``config(strict=True)``, if a fusion whose shape fits was refused.
    """
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
    by_values = _checks_values(graph, config)
    passed: dict[Any, int] | None = None if buffers or by_values else {}
    able = not by_values and all([step.is_replayable for step in steps])
    return Plan(_with_dead(steps, results), results, inputs, buffers, decisions, graph, config, passed, able)


def _checks_values(graph: OpGraph, config: Config) -> bool:
    """Whether a check may look at values: on the host they are there, with ``debug`` they are waited for."""
    here = any(info is None or info.device.type != "cuda" for info in graph.inputs())
    return here or config.debug or any(op.checks_values for node in graph.leaves() if (op := graph.op(node)))


def _with_dead(steps: tuple[Step, ...], results: tuple[int, ...]) -> tuple[Step, ...]:
    """Notes after which step an output is read no more, so that it need not live on."""
    last = {slot: i for i, step in enumerate(steps) for slot in (*step.outputs, step.x, *(s for _, s in step.reads))}
    made = {slot for step in steps for slot in step.outputs} - set(results)
    return tuple(replace(step, dead=tuple(s for s in made if last[s] == i)) for i, step in enumerate(steps))


def _keywords(steps: tuple[Step, ...]) -> Iterator[tuple[str, int, Keyword]]:
    """What errors call it, the slot, and the declaration of everything that a call gives."""
    made = {slot for step in steps for slot in step.outputs}
    for leaf, op, reads in (each for s in steps for each in zip(s.leaves, s.ops, s.leaf_reads, strict=True)):
        for name, slot in reads or ():
            if op and slot not in made:
                yield f"{leaf}: {name!r}", slot, op.keywords[name]


class _Builder:
    """Turns nodes into steps, and (node, output) into slots."""

    def __init__(self, graph: OpGraph, taken: list[Decision]) -> None:
        self.graph = graph
        self.decision_of = {node: d for d in taken for node in d.match.nodes.values()}
        inputs = [n for n in graph.nx if graph.leaf(n) is None]
        self.slots: dict[tuple[str, str], int] = {(n, "y"): slot for slot, n in enumerate(inputs)}
        self.given = self.next = len(inputs)

    def steps(self) -> Iterator[Step]:
        for nodes in self._order():
            decision = self.decision_of.get(nodes[0])
            yield self._fused(decision, nodes) if decision else self._single(nodes[0])

    def results(self) -> tuple[int, ...]:
        """The slots of the main output and of the extra outputs that no op reads."""
        leaves = self.graph.leaves()
        results = [self.slots[leaves[-1] if leaves else X, "y"]]
        for node in leaves:
            op, read = self.graph.op(node), {output for _, _, output in self.graph.readers(node)}
            results += [self.slots[node, name] for name in (op.extra_outputs if op else ()) if name not in read]
        return tuple(results)

    def _order(self) -> list[list[str]]:
        """The nodes of each step, in execution order: what a fusion took is one run of ops, as its legality says."""
        steps: dict[Any, list[str]] = {}
        for node in self.graph.leaves():
            steps.setdefault(id(self.decision_of[node]) if node in self.decision_of else node, []).append(node)
        return list(steps.values())

    def _single(self, node: str) -> Step:
        leaf = self.graph.leaf(node)
        assert leaf is not None
        module, op = leaf.module, leaf.op
        assert module is not None
        sources = self.graph.sources(node)
        x = self.slots[sources.pop("x")]
        reads = tuple((port, self.slots[source]) for port, source in sources.items())
        outputs = self._file([(node, "y"), *((node, name) for name in (op.extra_outputs if op else ()))])
        names = None if op is None or is_called_whole(op) else op.input_names()
        how = self._late(reads), computes_parameters(module)
        return Step(module, (leaf,), (op,), (reads,), reads, x, outputs, names, *how)

    def _fused(self, decision: Decision, nodes: list[str]) -> Step:
        fused, match = decision.fused, decision.match
        assert fused is not None
        x = self.slots[legality.entry(match)]
        reads = tuple((name, self.slots[source]) for name, source in decision.reads.items())
        leaves = tuple(leaf for n in nodes if (leaf := self.graph.leaf(n)))
        ops, leaf_reads = tuple(map(self.graph.op, nodes)), tuple(self._leaf_reads(n) for n in nodes)
        makers = {name: n for n, op in zip(nodes, ops, strict=True) for name in (op.extra_outputs if op else ())}
        outputs = self._file([(legality.last(match), "y"), *((makers[name], name) for name in fused.extra_outputs)])
        how = self._late(reads), computes_parameters(fused)
        return Step(fused, leaves, ops, leaf_reads, reads, x, outputs, fused.input_names(), *how)

    def _late(self, reads: Reads) -> bool:
        return any(slot >= self.given for _, slot in reads)

    def _leaf_reads(self, node: str) -> Reads | None:
        """What an op inside a fused one reads; None if some of it is made inside."""
        sources = [(port, source) for port, source in self.graph.sources(node).items() if port != "x"]
        inside = any(source not in self.slots for _, source in sources)
        return None if inside else tuple((port, self.slots[source]) for port, source in sources)

    def _file(self, outputs: list[tuple[str, str]]) -> tuple[int, ...]:
        slots = tuple(range(self.next, self.next + len(outputs)))
        self.slots.update(zip(outputs, slots, strict=True))
        self.next += len(outputs)
        return slots
