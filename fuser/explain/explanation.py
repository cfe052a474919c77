"""``explain``: what a call runs and why, as data, tables and drawings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from torch import nn

from ..compiler.graph import OpGraph
from ..contract.tracing import KernelCall
from . import draw


def distinct_clauses(reasons: Iterable[str]) -> str:
    """Joins the reasons to one text, without repeated clauses."""
    return "; ".join(dict.fromkeys(clause for reason in reasons if reason for clause in reason.split("; ")))


@dataclass(frozen=True)
class KernelReport:
    """The kernels that a step calls in one direction.

    Attributes:
        kernel: their names; ``reason``: why these and no faster ones run, or why they are unknown if the name is ``?``.
        flops, bytes: the operations and the memory traffic, with every row in use.
        configurations: the chosen configurations, such as tiles, of kernels that have several.
    """

    kernel: str = "torch"
    reason: str = ""
    flops: int = 0
    bytes: int = 0
    configurations: tuple[str, ...] = ()

    @classmethod
    def of(cls, calls: Sequence[KernelCall]) -> KernelReport:
        """The report of recorded calls; without a record the step calls functions of torch."""
        return cls(
            kernel=" + ".join(dict.fromkeys(call.kernel for call in calls)) or "torch",
            reason=distinct_clauses(call.reason for call in calls),
            flops=sum(call.flops for call in calls),
            bytes=sum(call.bytes for call in calls),
            configurations=tuple(f"{call.kernel}, {call.configuration}" for call in calls if call.configuration),
        )


@dataclass(frozen=True)
class ExplainedStep:
    """One step of a plan. ``kernel``, ``reason``, ``flops``, ``bytes`` and ``configurations`` are the forward's.

    Attributes:
        name: the class of the op that runs.
        ops: the indices of its ops in the container; ``labels`` also distinguishes parts.
        forward: the kernels of the forward.
        backward: the kernels of the backward; None if nothing needs a gradient.
        shape: the shape of the output, None if it is unknown without data.
        saved_bytes: bytes kept for the backward, beyond parameters and tensors that an earlier step keeps.
        notes: other remarks, such as copied arguments.
    """

    name: str
    ops: tuple[int, ...]
    labels: tuple[str, ...]
    forward: KernelReport = KernelReport()
    backward: KernelReport | None = None
    shape: tuple[int, ...] | None = None
    saved_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        return self.forward.kernel

    @property
    def reason(self) -> str:
        return self.forward.reason

    @property
    def flops(self) -> int:
        return self.forward.flops

    @property
    def bytes(self) -> int:
        return self.forward.bytes

    @property
    def configurations(self) -> tuple[str, ...]:
        return self.forward.configurations

    @property
    def backward_reason(self) -> str:
        """The reason for the backward's kernels, if it differs from the forward's."""
        back = self.backward
        return "" if back is None or back.reason == self.reason else back.reason

    def to_dict(self) -> dict[str, object]:
        """The step as plain data: the forward's fields at the top level, the backward's under ``"backward"``."""
        fields = asdict(self)
        return {**fields, **fields.pop("forward")}


@dataclass(frozen=True)
class ExplainedFusion:
    """One match of a fusion's shape, and its outcome."""

    name: str
    ops: tuple[int, ...]
    labels: tuple[str, ...]
    taken: bool
    reason: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """The explanation of a call. Prints as tables; :meth:`to_text`, ``to_mermaid``, ``to_dot`` and ``to_svg`` draw it.

    Attributes:
        fusions: the fusions that were taken or refused, except those inside a larger fusion that was taken.
        near_misses: fusions that fit except for one op.
        replay: whether the call replays captured launches, or why not; empty on devices without launches. It depends on
            earlier calls, so comparisons ignore it.
    """

    steps: tuple[ExplainedStep, ...]
    fusions: tuple[ExplainedFusion, ...]
    rows: int
    graph: OpGraph
    near_misses: tuple[ExplainedFusion, ...] = ()
    replay: str = field(default="", compare=False)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward, with every row in use."""
        return sum(step.flops for step in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes that the forward's kernels must move."""
        return sum(step.bytes for step in self.steps)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of the backward, with every row in use."""
        return sum(report.flops for report in self._backwards())

    @property
    def backward_bytes(self) -> int:
        """Bytes that the backward's kernels must move."""
        return sum(report.bytes for report in self._backwards())

    @property
    def saved_bytes_per_row(self) -> float:
        """Bytes kept for the backward, per row of ``x``."""
        return sum(step.saved_bytes for step in self.steps) / max(1, self.rows)

    def to_dict(self) -> dict[str, object]:
        """Everything but the graph, as plain data."""
        return {
            "steps": [step.to_dict() for step in self.steps],
            "fusions": [asdict(fusion) for fusion in self.fusions],
            "near_misses": [asdict(fusion) for fusion in self.near_misses],
            "rows": self.rows,
            "flops": self.flops,
            "bytes": self.bytes,
            "backward_flops": self.backward_flops,
            "backward_bytes": self.backward_bytes,
            "saved_bytes_per_row": self.saved_bytes_per_row,
            "replay": self.replay,
        }

    def to_text(self) -> str:
        """The op graph as lines of text."""
        return str(self.graph)

    def to_mermaid(self) -> str:
        """The op graph for Mermaid, with a box around the ops of each fused op."""
        return draw.mermaid(self.graph, self._boxes())

    def to_dot(self) -> str:
        """The op graph for Graphviz, fused ops as clusters."""
        return draw.dot(self.graph, self._boxes())

    def to_svg(self) -> str:
        """The op graph as an SVG image."""
        return draw.svg(self.graph, self._boxes())

    def _boxes(self) -> dict[str, tuple[str, ...]]:
        return {f"{step.name} {' '.join(step.labels)}": step.labels for step in self.steps if len(step.labels) > 1}

    def _backwards(self) -> list[KernelReport]:
        return [step.backward for step in self.steps if step.backward is not None]

    def __str__(self) -> str:
        return "\n".join([*draw.table(self._steps()), *self._lines(), "", *draw.table(self._fusions())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The tables, for notebooks."""
        lines = map(draw.html_line, self._lines())
        return "\n".join([draw.html_table(self._steps()), *lines, draw.html_table(self._fusions())])

    def _steps(self) -> list[tuple[str, ...]]:
        """The table of steps, with its heading."""
        heading = ("step", "ops", "kernel", "output", "GFLOP", "MB", "saved B/row", "reason")
        return [heading, *(row for step in self.steps for row in self._rows_of(step))]

    def _fusions(self) -> list[tuple[str, ...]]:
        """The table of fusions, with its heading."""
        rows = [(f.name, " ".join(f.labels), "taken" if f.taken else "refused", f.reason) for f in self.fusions]
        rows += [(f.name, " ".join(f.labels), "missed", f.reason) for f in self.near_misses]
        return [("fusion", "ops", "", "reason"), *rows] if rows else [("no fusion fits",)]

    def _lines(self) -> list[str]:
        """The lines between the tables: the total, the chosen configurations, and whether the call replays."""
        chosen = [line for step in self.steps for line in _chosen(step)]
        return [self._total(), *chosen, *([f"replay: {self.replay}"] if self.replay else [])]

    def _total(self) -> str:
        """The total cost of the call, in one line."""
        sizes = _sizes(self.flops, self.bytes)
        total = f"{sizes[0]} GFLOP, {sizes[1]} MB, {self.saved_bytes_per_row:.0f} saved bytes a row"
        if self._backwards():
            sizes = _sizes(self.backward_flops, self.backward_bytes)
            total += f"; backward {sizes[0]} GFLOP, {sizes[1]} MB"
        unknown = sum(step.shape is None for step in self.steps)
        if unknown:
            total += f"; {unknown} of {len(self.steps)} steps, of unknown shapes, are not counted"
        return total

    def _rows_of(self, step: ExplainedStep) -> Iterator[tuple[str, str, str, str, str, str, str, str]]:
        """The step's row in the table, and that of its backward if it adds information or runs on CUDA."""
        shape = "?" if step.shape is None else "x".join(map(str, step.shape))
        saved = f"{step.saved_bytes / max(1, self.rows):.0f}"
        why = distinct_clauses((step.reason, *step.notes))
        labels = " ".join(step.labels)
        yield step.name, labels, step.kernel, shape, *_sizes(step.flops, step.bytes), saved, why
        back = step.backward
        on_cuda = any(spec.device.type == "cuda" for spec in self.graph.inputs() if spec is not None)
        if back is None or not (on_cuda or step.backward_reason or back.kernel not in (step.kernel, "?")):
            return
        sizes = _sizes(back.flops, back.bytes)
        yield "  backward", labels, back.kernel, "", *sizes, "", step.backward_reason


def _sizes(flops: int, moved: int) -> tuple[str, str]:
    """Formats GFLOP and MB."""
    return f"{flops / 1e9:.3f}", f"{moved / 1e6:.2f}"


def _chosen(step: ExplainedStep) -> Iterator[str]:
    """A line for each configuration of the step's kernels, forward and backward."""
    name = " ".join((step.name, *step.labels))
    for title, report in ((name, step.forward), (f"{name} backward", step.backward)):
        yield from (f"{title}: {text}" for text in (report.configurations if report else ()))


class StandIn(nn.Module):
    """A module that is not an op.

    Attributes:
        reason: the reason why no op replaces it, which ``explain`` prints.
    """

    reason: str = ""
