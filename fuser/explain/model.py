"""``explain`` of anything: a container, an op, or a whole model, with a row for each of its containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from torch import nn

from ..compiler.binding import OpKwargs
from ..compiler.flatten import Container
from ..errors import ArgumentError
from ..op import Op
from . import draw
from .explanation import Explanation


class Explainable(Protocol):
    """A container that can explain its calls."""

    @property
    def was_called(self) -> bool:
        """Whether there is a last call to explain."""

    def explain(self, *args: Any, op_kwargs: OpKwargs | None = None, **shared: Any) -> Explanation:
        """Explains a call with these arguments, or the last one."""


class Found(NamedTuple):
    """A container that runs a module of somebody else's, and what brings rows to its groups and back."""

    container: Explainable
    routing: str = ""


Finder = Callable[[nn.Module], Found | str | None]
"""Says what runs a module of somebody else's; or why we do not; or None, if it is no such module."""

_finders: list[Finder] = []


def add_finder(finder: Finder) -> None:
    """Lets :func:`explain` see modules that run through a container which is no child of theirs."""
    if finder not in _finders:
        _finders.append(finder)


@dataclass(frozen=True)
class ExplainedLayer:
    """One container of a model: where it stands, the class there, and its last call, or why there is none.

    ``routing`` says what brought rows to its groups and back, where that is ours to do.
    """

    path: str
    kind: str
    explanation: Explanation | None
    reason: str
    routing: str = ""

    def row(self) -> tuple[str, ...]:
        """The layer in one line."""
        found = self.explanation
        if found is None:
            return (self.path, self.kind, *["-"] * 7, self.reason)
        names = " + ".join(step.name for step in found.steps)
        kernels = " + ".join(dict.fromkeys(step.kernel for step in found.steps))
        backward = " + ".join(dict.fromkeys(step.backward.kernel for step in found.steps if step.backward)) or "-"
        sizes = f"{found.rows}", f"{found.flops / 1e9:.3f}", f"{found.saved_bytes_per_row:.0f}"
        return (self.path, self.kind, names, kernels, backward, self.routing or "-", *sizes, self.reason)


@dataclass(frozen=True)
class ModelExplanation:
    """What the containers of a model ran in their last calls. Prints as a table; ``layers`` has the details."""

    layers: tuple[ExplainedLayer, ...]

    def __str__(self) -> str:
        if not self.layers:
            return "no layer runs through fusible"
        heading = ("layer", "module", "runs", "kernel", "backward", "routing", "rows", "GFLOP", "saved B/row", "reason")
        return "\n".join(draw.table([heading, *(layer.row() for layer in self.layers)]))


def explain(
    module: nn.Module, *args: Any, op_kwargs: OpKwargs | None = None, **shared: Any
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
        explanation: Explanation = module._standalone.explain(module, args, {"op_kwargs": op_kwargs, **shared})
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
    found = _found(module)
    if found is not None:
        yield _layer(module, path, found)
        return
    for name, child in module.named_children():
        yield from _layers(child, f"{path}.{name}" if path else name)


def _found(module: nn.Module) -> Found | str | None:
    if isinstance(module, Container):
        return Found(cast(Explainable, module))
    for finder in _finders:
        found = finder(module)
        if found is not None:
            return found
    return None


def _layer(module: nn.Module, path: str, found: Found | str) -> ExplainedLayer:
    kind = type(module).__name__
    if isinstance(found, str):
        return ExplainedLayer(path, kind, None, found)
    if not found.container.was_called:
        return ExplainedLayer(path, kind, None, "no call yet")
    explanation = found.container.explain()
    lost = [fusion for fusion in (*explanation.fusions, *explanation.near_misses) if not fusion.taken]
    refused = [f"{fusion.name}: {fusion.reason}" for fusion in lost]
    shadowed = len(explanation.steps) == 1  # everything is one step: what else would have fitted is of no interest
    reasons = [reason for step in explanation.steps for reason in (step.reason, step.backward_reason)]
    reasons += [] if shadowed else refused
    reason = "; ".join(filter(None, dict.fromkeys(reasons)))
    return ExplainedLayer(path, kind, explanation, reason, found.routing)
