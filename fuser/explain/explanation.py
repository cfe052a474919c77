"""``explain``: what a call runs and why, as data, as tables and as drawings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..compiler.graph import OpGraph
from . import draw


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
        unknown = sum(step.shape is None for step in self.steps)
        if unknown:
            total += f"; {unknown} of {len(self.steps)} steps, of unknown shapes, are not counted"
        chosen = [f"{' '.join((s.name, *s.labels))}: {text}" for s in self.steps for text in s.configurations]
        return "\n".join(
            [*draw.table(steps), total, *chosen, "", *draw.table(fusions if self.fusions else [("no fusion fits",)])]
        )


class StandIn(nn.Module):
    """A module in an op's place.

    Attributes:
        reason: why there is no op for it, which ``explain`` prints.
    """

    reason: str = ""
