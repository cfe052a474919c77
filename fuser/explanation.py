"""``explain``: what a call runs and why, found by running its plan on tensors that hold no data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from . import draw, trace
from .autograd import Runtime, differentiable
from .graph import OpGraph
from .halves import call_fwd
from .op import Op
from .own_code import has_own_forward
from .plan import Plan
from .saved import tensors_of
from .step import Step


class Shape(NamedTuple):
    """An argument of a call without its data; ``value`` is what is no tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    device: torch.device | None
    requires_grad: bool
    value: Any = None

    @classmethod
    def of(cls, value: Any) -> Shape:
        if not isinstance(value, Tensor):
            return cls((), None, None, False, value)
        return cls(tuple(value.shape), value.dtype, value.device, value.requires_grad)

    def fake(self) -> Any:
        """A tensor like it, to be called under a ``FakeTensorMode``."""
        if self.dtype is None:
            return self.value
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class ExplainedStep:
    """One step of a plan.

    Attributes:
        name: the class of the op that runs.
        ops: the indices in the container of the ops that it stands for; ``labels`` also tells parts apart.
        kernel: the kernels that it calls; ``reason``: why these, and no faster ones.
        shape: of the output, None if it is not known without data.
        flops, bytes: what its kernels compute and must move, once through, with every row in use.
        saved_bytes: what it keeps for the backward, beyond parameters and what an earlier step keeps.
        configurations: of the kernels that have several, what was chosen: tiles and the like.
        notes: anything else, such as arguments that are copied.
    """

    name: str
    ops: tuple[int, ...]
    labels: tuple[str, ...]
    kernel: str = "torch"
    reason: str = ""
    shape: tuple[int, ...] | None = None
    flops: int = 0
    bytes: int = 0
    saved_bytes: int = 0
    configurations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExplainedFusion:
    """One place where a fusion's shape fits, and what became of it."""

    name: str
    ops: tuple[int, ...]
    labels: tuple[str, ...]
    taken: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What a call runs. Prints as tables; :meth:`to_text`, ``to_mermaid``, ``to_dot`` and ``to_svg`` draw it."""

    steps: tuple[ExplainedStep, ...]
    fusions: tuple[ExplainedFusion, ...]
    rows: int
    graph: OpGraph

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward, with every row in use."""
        return sum(step.flops for step in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes that the forward's kernels must move."""
        return sum(step.bytes for step in self.steps)

    @property
    def saved_bytes_per_row(self) -> float:
        """Bytes kept for the backward, a row of ``x``."""
        return sum(step.saved_bytes for step in self.steps) / max(1, self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graph, as plain data."""
        return {
            "steps": [asdict(step) for step in self.steps],
            "fusions": [asdict(fusion) for fusion in self.fusions],
            "rows": self.rows,
            "flops": self.flops,
            "bytes": self.bytes,
            "saved_bytes_per_row": self.saved_bytes_per_row,
        }

    def to_text(self) -> str:
        """The op graph as lines of text."""
        return str(self.graph)

    def to_mermaid(self) -> str:
        """The op graph for Mermaid, fused ops as boxes around theirs."""
        return draw.mermaid(self.graph, self._boxes())

    def to_dot(self) -> str:
        """The op graph for Graphviz, fused ops as clusters."""
        return draw.dot(self.graph, self._boxes())

    def to_svg(self) -> str:
        """The op graph as an SVG image."""
        return draw.svg(self.graph, self._boxes())

    def _boxes(self) -> dict[str, tuple[str, ...]]:
        return {f"{step.name} {' '.join(step.labels)}": step.labels for step in self.steps if len(step.labels) > 1}

    def __str__(self) -> str:
        steps: list[tuple[str, ...]] = [("step", "ops", "kernel", "output", "GFLOP", "MB", "saved B/row", "reason")]
        for s in self.steps:
            shape = "?" if s.shape is None else "x".join(map(str, s.shape))
            saved = f"{s.saved_bytes / max(1, self.rows):.0f}"
            why = "; ".join(filter(None, (s.reason, *s.notes)))
            steps.append(
                (
                    s.name,
                    " ".join(s.labels),
                    s.kernel,
                    shape,
                    f"{s.flops / 1e9:.3f}",
                    f"{s.bytes / 1e6:.2f}",
                    saved,
                    why,
                )
            )
        fusions: list[tuple[str, ...]] = [("fusion", "ops", "", "reason")]
        fusions += [(f.name, " ".join(f.labels), "taken" if f.taken else "refused", f.reason) for f in self.fusions]
        total = (
            f"{self.flops / 1e9:.3f} GFLOP, {self.bytes / 1e6:.2f} MB, {self.saved_bytes_per_row:.0f} saved bytes a row"
        )
        chosen = [f"{' '.join((s.name, *s.labels))}: {text}" for s in self.steps for text in s.configurations]
        return "\n".join(
            [*draw.table(steps), total, *chosen, "", *draw.table(fusions if self.fusions else [("no fusion fits",)])]
        )


def explain_plan(plan: Plan, shapes: list[Shape], runtime: Runtime) -> Explanation:
    """Explains a plan for arguments of the given shapes."""
    steps = tuple(_explain_steps(plan, shapes, runtime))
    fusions = []
    for decision in plan.decisions:
        leaves = [leaf for node in decision.match.nodes.values() if (leaf := plan.graph.leaf(node))]
        labels, ops = tuple(leaf.label for leaf in leaves), tuple(dict.fromkeys(leaf.index for leaf in leaves))
        fusions.append(ExplainedFusion(decision.fusion.name, ops, labels, decision.taken, decision.reason))
    return Explanation(steps, tuple(fusions), math.prod(shapes[0].shape[:-1]), plan.graph)


def _explain_steps(plan: Plan, shapes: list[Shape], runtime: Runtime) -> Iterator[ExplainedStep]:
    kept: dict[int, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(runtime.grad_enabled):
        values: list[Any] | None = [shape.fake() for shape in shapes]
        for step in plan.steps:
            labels, ops = (leaf.label for leaf in step.leaves), dict.fromkeys(leaf.index for leaf in step.leaves)
            plain = ExplainedStep(step.name, tuple(ops), tuple(labels))
            if values is None:
                yield replace(plain, reason="its input is not known without data")
            elif isinstance(step.module, Op):
                try:
                    yield _explain_op(plain, step, step.module, values, runtime, mode, kept)
                except Exception as error:
                    why = _unexplained(step.module, error)
                    if why is None:
                        raise
                    values = None
                    yield replace(plain, kernel="?", reason=why)
            else:
                values = _run_module(step.module, step.x, values, mode)
                shape = None if values is None else tuple(values[-1].shape)
                reason = step.module.reason if isinstance(step.module, StandIn) else ""
                yield replace(plain, kernel="module", reason=reason or "not an Op: runs as it is", shape=shape)


class StandIn(nn.Module):
    """A module in an op's place.

    Attributes:
        reason: why there is no op for it, which ``explain`` prints.
    """

    reason: str = ""


class _OwnForwardError(Exception):
    """What calling the op does is not what its halves do."""


def _unexplained(op: Op, error: Exception) -> str | None:
    """Why nobody can say what an op does but by calling it; None: that is an error."""
    if isinstance(error, DataDependentOutputException):
        return "it reads values, so it cannot run without data"
    if isinstance(error, _OwnForwardError):
        return "it has a forward of its own, which may do anything"
    return "its hooks may change what it is given" if op._forward_pre_hooks else None


def _explain_op(
    plain: ExplainedStep,
    step: Step,
    op: Op,
    values: list[Any],
    runtime: Runtime,
    mode: FakeTensorMode,
    kept: dict[int, Tensor],
) -> ExplainedStep:
    if has_own_forward(op):
        raise _OwnForwardError
    x, keywords = values[step.x], {name: values[slot] for name, slot in step.reads}
    named = differentiable(op, x, keywords) if runtime.grad_enabled else {}
    needs = frozenset(name for name, tensor in named.items() if tensor.requires_grad)
    for parameter in op.parameters():  # alive for as long as their storages are compared, or an address comes back
        kept |= {_storage(p): p for p in (parameter, mode.from_tensor(parameter))}
    with trace.recording() as seen, torch.no_grad():
        outputs, saved = call_fwd(op, x, keywords, needs, runtime.autocast_dtype)
    new = {_storage(t): t for t in tensors_of(saved) if needs and _storage(t) not in kept}
    kept |= new
    values.extend(y.detach().requires_grad_(bool(needs) and y.is_floating_point()) for y in outputs)
    return replace(
        plain,
        kernel=" + ".join(dict.fromkeys(call.kernel for call in seen.calls)) or "torch",
        reason="; ".join(dict.fromkeys(call.reason for call in seen.calls if call.reason)),
        shape=tuple(outputs[0].shape),
        flops=sum(call.flops for call in seen.calls),
        bytes=sum(call.bytes for call in seen.calls),
        saved_bytes=sum(t.untyped_storage().nbytes() for t in new.values()),
        configurations=tuple(f"{call.kernel}, {call.configuration}" for call in seen.calls if call.configuration),
        notes=tuple(dict.fromkeys(seen.notes)),
    )


def _run_module(module: nn.Module, x: int, values: list[Any], mode: FakeTensorMode) -> list[Any] | None:
    """The values with the module's output, or None if it cannot run without data."""
    try:
        whole = _WithoutHooks(module)
        tensors: list[tuple[str, Tensor]] = [*whole.named_parameters(), *whole.named_buffers()]
        state: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors}
        with torch.no_grad():
            y = torch.func.functional_call(whole, state, (values[x],))
    except Exception:  # whatever a module of the user's does with tensors that hold no data
        return None
    trains = values[x].requires_grad or any(p.requires_grad for p in module.parameters())
    return [*values, y.detach().requires_grad_(trains)] if isinstance(y, Tensor) else None


class _WithoutHooks(nn.Module):
    """Runs a module, but none of its hooks, which are the user's code and meant for calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module.forward(x)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
