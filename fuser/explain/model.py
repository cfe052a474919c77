"""``explain`` of anything: a container, an op, or a whole model, with a row for each of its containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from torch import nn

from ..compiler.flatten import Container
from ..contract.errors import ArgumentError
from ..contract.op import Op, OpKwargs
from . import draw
from .explanation import Explanation, distinct_clauses


class Explainable(Protocol):
    """A container that can explain its calls."""

    @property
    def was_called(self) -> bool:
        """Whether there is a last call to explain."""

    def explain(self, *args: object, op_kwargs: OpKwargs | None = None, **shared: object) -> Explanation:
        """Explains a call with these arguments, or the last one."""


class LayerContainer(NamedTuple):
    """A container that runs a foreign module, and the backend that routes its rows."""

    container: Explainable
    routing: str = ""


_NO_LAYER = "no layer runs through fusible"
Finder = Callable[[nn.Module], LayerContainer | str | None]
"""Returns the container that runs a foreign module, or the reason why none does, or None for other modules."""

_finders: list[Finder] = []


def add_finder(finder: Finder) -> None:
    """Makes :func:`explain` see modules that run through a container which is not their child."""
    if finder not in _finders:
        _finders.append(finder)


@dataclass(frozen=True)
class ExplainedLayer:
    """One container of a model: its path, the class there, and its last call, or the reason why there is none.

    ``routing`` names the backend that routed the rows, if the container does not.
    """

    path: str
    kind: str
    explanation: Explanation | None
    reason: str
    routing: str = ""

    def to_dict(self) -> dict[str, object]:
        """The layer as plain data; the call under ``"explanation"``, None if there was none."""
        call = None if self.explanation is None else self.explanation.to_dict()
        about = {"path": self.path, "kind": self.kind, "routing": self.routing, "reason": self.reason}
        return {**about, "explanation": call}

    def row(self) -> tuple[str, ...]:
        """The layer in one line."""
        explanation = self.explanation
        if explanation is None:
            return (self.path, self.kind, *["-"] * 7, self.reason)
        names = " + ".join(step.name for step in explanation.steps)
        kernels = " + ".join(dict.fromkeys(step.kernel for step in explanation.steps))
        backward = " + ".join(dict.fromkeys(step.backward.kernel for step in explanation.steps if step.backward)) or "-"
        sizes = f"{explanation.rows}", f"{explanation.flops / 1e9:.3f}", f"{explanation.saved_bytes_per_row:.0f}"
        return (self.path, self.kind, names, kernels, backward, self.routing or "-", *sizes, self.reason)


@dataclass(frozen=True, repr=False)
class ModelExplanation:
    """The last calls of a model's containers; ``layers`` has the details.

    Prints as a table, in which layers that differ only in the number in their path share a row.
    """

    layers: tuple[ExplainedLayer, ...]

    def to_dict(self) -> dict[str, object]:
        """Everything but the graphs, as plain data."""
        return {"layers": [layer.to_dict() for layer in self.layers]}

    def __str__(self) -> str:
        return "\n".join(draw.table(self._rows())) if self.layers else _NO_LAYER

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return draw.html_table(self._rows()) if self.layers else draw.html_line(_NO_LAYER)

    def _rows(self) -> list[tuple[str, ...]]:
        heading = ("layer", "module", "runs", "kernel", "backward", "routing", "rows", "GFLOP", "saved B/row", "reason")
        return [heading, *grouped([layer.row() for layer in self.layers])]


def explain(
    module: nn.Module, *args: object, op_kwargs: OpKwargs | None = None, **shared: object
) -> Explanation | ModelExplanation:
    """:meth:`Sequential.explain` of a container, or of an op alone; of a model, the last call of each container in it.

    >>> import torch, fusible
    >>> mlp = fusible.Sequential(fusible.Linear(4, 8), fusible.SwiGLU(), fusible.Linear(4, 4))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), mlp)
    >>> y = model(torch.randn(3, 4))
    >>> [layer.path for layer in fusible.explain(model).layers]
    ['1']

    Raises:
        ArgumentError: arguments of a call, for something that is neither a container nor an op; else as
            :meth:`Sequential.explain`.
    """
    if isinstance(module, Op):
        explanation: Explanation = module._standalone.explain(module, args, op_kwargs, shared)
        return explanation
    if isinstance(module, Container):
        return cast(Explainable, module).explain(*args, op_kwargs=op_kwargs, **shared)
    if not isinstance(module, nn.Module) or args or op_kwargs or shared:
        kind = type(module).__name__
        raise ArgumentError(
            f"explain: expected a fusible.Sequential or an Op, got a {kind}, which takes no arguments here"
        )
    return ModelExplanation(tuple(_layers(module, "")))


def _layers(module: nn.Module, path: str) -> Iterator[ExplainedLayer]:
    container = _find_container(module)
    if container is not None:
        yield _layer(module, path, container)
        return
    for name, child in module.named_children():
        yield from _layers(child, f"{path}.{name}" if path else name)


def _find_container(module: nn.Module) -> LayerContainer | str | None:
    if isinstance(module, Container):
        return LayerContainer(cast(Explainable, module))
    for finder in _finders:
        container = finder(module)
        if container is not None:
            return container
    return None


def _layer(module: nn.Module, path: str, container: LayerContainer | str) -> ExplainedLayer:
    kind = type(module).__name__
    if isinstance(container, str):
        return ExplainedLayer(path, kind, None, container)
    if not container.container.was_called:
        return ExplainedLayer(path, kind, None, "no call yet")
    explanation = container.container.explain()
    lost = [fusion for fusion in (*explanation.fusions, *explanation.near_misses) if not fusion.taken]
    refused = [f"{fusion.name}: {fusion.reason}" for fusion in lost]
    shadowed = len(explanation.steps) == 1  # everything is one step: what else would have fitted is of no interest
    reasons = [reason for step in explanation.steps for reason in (step.reason, step.backward_reason)]
    reasons += [] if shadowed else refused
    return ExplainedLayer(path, kind, explanation, distinct_clauses(reasons), container.routing)


# ---- table rows that differ only in one number of their path share a row, with the numbers as ranges


TableRow = tuple[str, ...]


class Numbered(NamedTuple):
    """A row with a number in its path; rows with an equal rest can share a row."""

    before: tuple[str, ...]
    number: int
    after: tuple[str, ...]
    rest: TableRow

    @classmethod
    def of(cls, row: TableRow) -> Numbered | None:
        """The row by the first number in its path; None if it has no number."""
        parts = row[0].split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        return None if at is None else cls(tuple(parts[:at]), int(parts[at]), tuple(parts[at + 1 :]), row[1:])

    @property
    def key(self) -> tuple[object, ...]:
        return self.before, self.after, self.rest


def grouped(rows: Sequence[TableRow]) -> list[TableRow]:
    """Groups rows whose first column is a path; rows that share one take the place of the first."""
    numbers: dict[object, list[int]] = {}
    firsts: dict[object, TableRow | Numbered] = {}
    for row in rows:
        numbered = Numbered.of(row)
        key = row if numbered is None else numbered.key
        firsts.setdefault(key, row if numbered is None else numbered)
        numbers.setdefault(key, []).extend([] if numbered is None else [numbered.number])
    return [_joined(first, numbers[key]) for key, first in firsts.items()]


def _joined(first: TableRow | Numbered, numbers: Iterable[int]) -> TableRow:
    if not isinstance(first, Numbered):
        return first
    return (".".join([*first.before, ",".join(_ranges(sorted(numbers))), *first.after]), *first.rest)


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Ascending numbers: ``0-2``, ``5``."""
    start = 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            yield f"{numbers[start]}-{number}" if i > start else f"{number}"
            start = i + 1
