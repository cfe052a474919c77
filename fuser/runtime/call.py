"""Runs ``fwd`` and ``bwd`` of one op, and packs the state that passes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..contract.config import Config, thread_config
from ..contract.op import Delivery, Gradient, Grads, Keywords, Op, Outputs, SideEffects
from ..contract.torch_private import engine_will_run
from .buffers import overlap
from .residuals import Source, pack, unpack

_NONE: Sequence[Delivery] = ()


class Node(Protocol):
    """The autograd node of an op."""

    @property
    def next_functions(self) -> tuple[tuple[object, int], ...]:
        """The nodes that gradients go to, in the order of the inputs."""

    def maybe_clear_saved_tensors(self) -> None:
        """Lets go of the saved tensors, unless the graph is retained."""


@dataclass(slots=True)
class BackwardContext:
    """The state of a backward besides its saved tensors.

    Attributes:
        names: the names of the differentiable tensors; ``wanted``: the names whose gradients the forward wanted.
        rest: the ``Saved`` of ``fwd``, without its tensors.
        config: the switches of the forward.
        order: the order of the saved tensors in ``rest``; None if they were saved in that order.
        sources: the sources of tensors that autograd saves one by one. They follow ``number`` others.
        shapes: the shapes of the named tensors, if gradients are to be checked.
    """

    op: Op
    names: tuple[str, ...]
    wanted: frozenset[str]
    rest: object
    config: Config
    order: tuple[int, ...] | None = None
    sources: tuple[Source, ...] = ()
    number: int = 0
    shapes: tuple[torch.Size, ...] = ()

    def gradients(
        self, tensors: list[Tensor], lent: Sequence[Tensor], douts: tuple[Tensor, ...], node: Node | None
    ) -> list[Tensor | None]:
        """Runs the backward of an autograd node; returns the gradients in the order of the names.

        Args:
            tensors: the tensors that autograd saved. The list is emptied, so that each is freed after its last use.
        """
        joined: list[Tensor | Sequence[Tensor]] = []
        if self.sources:
            joined = self.joined(tensors)
            del tensors[self.number :]
        wanted, requested = self.wanted, _NONE
        has_none = type(self.op).deliveries is Op.deliveries
        if not has_none and (deliveries := self.op.deliveries(wanted)):
            assert node is not None, "deliveries are asked for by autograd alone"
            requested, wanted = self.requested(deliveries, node)
            if lent:
                refuse_overlaps(self.op, requested, [each.side_effects() for each in requested], lent)
        if node is not None:  # None outside of autograd
            node.maybe_clear_saved_tensors()  # nothing where the graph is retained
        return self.run(tensors, lent, joined, douts, wanted, requested)

    def run(
        self,
        tensors: list[Tensor],
        lent: Sequence[Tensor],
        joined: Sequence[Tensor | Sequence[Tensor]],
        douts: tuple[Tensor, ...],
        wanted: frozenset[str],
        requested: Sequence[Delivery],
    ) -> list[Tensor | None]:
        """Runs ``bwd``, then the thunks of wanted gradients; each is dropped with its inputs after it ran.

        Args:
            tensors: the saved tensors; the list is emptied.
            lent: buffers of the caller.
            joined: the values of tensors that were saved one by one.
            douts: the gradients of the outputs.
            requested: the wanted deliveries of ``bwd``.
        """
        saved = unpack(self.rest, tensors if self.order is None else [tensors[i] for i in self.order], lent, joined)
        tensors.clear()
        grads = dict(call_bwd(self.op, saved, douts, wanted))
        del saved  # thunks alone have its tensors now
        for name in [*grads]:
            if name not in self.names:
                raise RuntimeError(
                    f"{type(self.op).__name__}.bwd returned gradients for {sorted(grads.keys() - set(self.names))}, "
                    f"which it does not read; it returned {sorted(grads)}"
                )
            if name not in wanted:
                del grads[name]
        gradients: list[Tensor | None] = []
        for name in self.names:
            gradient = grads.pop(name) if name in wanted else None
            is_thunk = not isinstance(gradient, Tensor) and callable(gradient)
            gradients.append(gradient() if is_thunk else gradient)  # type: ignore[misc, arg-type, operator]
            gradient = None  # frees its inputs before the next one is computed
        if self.shapes:
            self._refuse_misshapen(gradients)
        return gradients

    def _refuse_misshapen(self, gradients: Sequence[Tensor | None]) -> None:
        """Raises if autograd would, whose error does not name the gradient. Autograd sums broadcast dimensions."""
        for name, shape, gradient in zip(self.names, self.shapes, gradients, strict=True):
            if gradient is None or gradient.is_nested or gradient.shape == shape:
                continue
            sizes = zip(reversed(shape), reversed(gradient.shape), strict=False)
            if len(gradient.shape) < len(shape) or any(size not in (1, of_grad) for size, of_grad in sizes):
                raise RuntimeError(
                    f"{type(self.op).__name__}.bwd returned a gradient of shape {list(gradient.shape)} for {name!r}, "
                    f"whose shape is {list(shape)}"
                )

    def requested(self, deliveries: Sequence[Delivery], node: Node) -> tuple[list[Delivery], frozenset[str]]:
        """The deliveries, and the names of all gradients, that the running backward wants.

        A node's flags were set in the forward, but ``torch.autograd.grad`` may leave out some inputs. So the engine is
        asked whether it will run the nodes after this one.
        """
        requested = []
        for each in deliveries:
            producer = node.next_functions[self.names.index(each.name)][0]
            try:
                wanted = producer is None or engine_will_run(producer)
            except RuntimeError:  # a leaf whose gradient ``grad`` returns, or no engine that could leave one out
                wanted = True
            if wanted:
                requested.append(each)
        if len(requested) == len(deliveries):
            return requested, self.wanted
        return requested, self.wanted - {each.name for each in deliveries if each not in requested}

    def apart(self) -> list[Tensor]:
        """The current tensors of the sources that autograd saves one by one."""
        tensors: list[Tensor] = []
        for source in self.sources:
            tensors += source.tensors()
        return tensors

    def joined(self, tensors: Sequence[Tensor]) -> list[Tensor | Sequence[Tensor]]:
        """The values for ``bwd`` of tensors that were saved one by one."""
        values, at = list[Tensor | Sequence[Tensor]](), self.number
        for source in self.sources:
            values += (source.joined(tensors[at : at + source.number]),)
            at += source.number
        return values


class ForwardResult(NamedTuple):
    """The outputs of a forward, and the state of its backward.

    Attributes:
        kept: tensors that autograd saves, each once; ``apart``: tensors that it saves one by one.
        lent: buffers of the caller.
    """

    outputs: tuple[Tensor, ...]
    kept: Sequence[Tensor]
    apart: Sequence[Tensor]
    lent: Sequence[Tensor]
    context: BackwardContext


class EagerStep(NamedTuple):
    """A forward that is run by the code of its op.

    Attributes:
        names: the tensors whose gradients autograd may want.
        x_is_inner: whether x was computed in the call, rather than given.
        shapes: the shapes of those tensors, if their gradients are to be checked.
    """

    op: Op
    keywords: Mapping[str, Any]
    autocast_dtype: torch.dtype | None
    names: tuple[str, ...]
    x_is_inner: bool = False
    shapes: tuple[torch.Size, ...] = ()

    def run(self, x: Tensor, flags: tuple[bool, ...]) -> ForwardResult:
        """Runs it; ``flags``: of each name, whether its gradient is wanted."""
        wanted = _wanted(self.names, flags)
        outputs, saved = call_fwd(self.op, x, self.keywords, wanted, self.autocast_dtype, self.x_is_inner)
        kept, lent, apart, rest = pack(saved)
        once, order = (kept, None) if len({*map(id, kept)}) == len(kept) else _each_once(kept)
        op = self.op if self.op._outline is None else self.op._outline
        config = thread_config.config
        if not apart:
            context = BackwardContext(op, self.names, wanted, rest, config, order, shapes=self.shapes)
            return ForwardResult(outputs, once, (), lent, context)
        sources, one_by_one = [], list[Tensor]()
        for each in apart:
            sources.append(each.source)
            one_by_one += each.tensors
        context = BackwardContext(op, self.names, wanted, rest, config, order, tuple(sources), len(once), self.shapes)
        return ForwardResult(outputs, once, one_by_one, lent, context)

    def inputs(self, x: Tensor) -> list[Tensor]:
        """All tensors that the step may read."""
        return [x, *self.keywords.values(), *self.op.device_inputs()]


def refuse_overlaps(
    op: Op, requested: Sequence[Delivery], effects: Sequence[SideEffects], lent: Sequence[Tensor]
) -> None:
    """Raises if a buffer of the backward shares memory with another tensor that it writes."""
    for buffer in lent:
        for delivery, each in zip(requested, effects, strict=True):
            if any(overlap(buffer, tensor) for tensor in each.written):
                raise RuntimeError(
                    f"{type(op).__name__}: a buffer for a gradient overlaps in memory what that of {delivery.name} is "
                    "added to; give a buffer of its own"
                )


def call_fwd(
    op: Op,
    x: Tensor,
    keywords: Keywords,
    needs_grad: frozenset[str],
    autocast_dtype: torch.dtype | None,
    x_is_inner: bool = False,
) -> tuple[tuple[Tensor, ...], object]:
    """``op.fwd`` with the reserved names that it declares; returns the outputs in order, and ``Saved``."""
    arguments = with_reserved(op, "fwd", keywords, needs_grad, autocast_dtype, x_is_inner)
    decision_version = op.decision_version
    if autocast_dtype is None:
        returned = op.fwd(x, **arguments)
    else:  # the op casts its inputs itself; torch functions inside must not cast again
        with torch.autocast(x.device.type, enabled=False):
            returned = op.fwd(x, **arguments)
    if op.decision_version != decision_version:
        op.restore_decision_version(decision_version)
    if not isinstance(returned, tuple):
        raise RuntimeError(f"{type(op).__name__}.fwd must return (y, Saved), it returned a {type(returned).__name__}")
    result, saved = returned
    return (result,) if isinstance(result, Tensor) and not op.extra_outputs else _in_order(op, result), saved


def call_bwd(op: Op, saved: object, douts: tuple[Tensor, ...], needs_grad: frozenset[str]) -> Grads:
    """``op.bwd`` with the gradients of its outputs, and the reserved names that it declares."""
    extras = dict(zip(op.extra_outputs, douts[1:], strict=True)) if op.extra_outputs else {}
    decision_version = op.decision_version
    grads = op.bwd(saved, douts[0], **with_reserved(op, "bwd", extras, needs_grad, None))
    if op.decision_version != decision_version:
        op.restore_decision_version(decision_version)
    if type(grads) is not dict and not isinstance(grads, Mapping):
        raise RuntimeError(
            f"{type(op).__name__}.bwd must return gradients by name, such as {{'x': dx}}, it returned a "
            f"{type(grads).__name__}"
        )
    if not needs_grad <= grads.keys():
        missing = sorted(needs_grad - grads.keys())
        raise RuntimeError(f"{type(op).__name__}.bwd returned no gradient for {missing}; it returned {sorted(grads)}")
    return grads


def evaluate(gradient: Gradient) -> Tensor | None:
    """Calls a thunk."""
    return gradient() if callable(gradient) and not isinstance(gradient, Tensor) else gradient


def with_reserved(
    op: Op,
    method: str,
    keywords: Keywords,
    needs_grad: frozenset[str],
    autocast_dtype: torch.dtype | None,
    x_is_inner: bool = False,
) -> Mapping[str, object]:
    """The keywords, and the reserved names that ``op.fwd``, ``bwd`` or ``check`` declares."""
    declared = op.reserved[method]
    if not declared:
        return keywords
    arguments = dict(keywords)
    if "needs_grad" in declared:
        arguments["needs_grad"] = needs_grad
    if "autocast_dtype" in declared:
        arguments["autocast_dtype"] = autocast_dtype
    if "x_is_inner" in declared:
        arguments["x_is_inner"] = x_is_inner
    return arguments


@lru_cache(maxsize=4096)
def _wanted(names: tuple[str, ...], flags: tuple[bool, ...]) -> frozenset[str]:
    return frozenset([name for name, flag in zip(names, flags, strict=True) if flag])


def _each_once(kept: list[Tensor]) -> tuple[list[Tensor], tuple[int, ...]]:
    """The tensors without repetitions, such as split sizes that two ops keep, and the order that restores them.

    A call keeps as many tensors each time, replayed or not: activation checkpointing counts them.
    """
    ids = list(map(id, kept))
    once = dict(zip(ids, kept, strict=True))
    places = dict(zip(once, range(len(once)), strict=True))
    return [*once.values()], tuple(map(places.__getitem__, ids))


def _in_order(op: Op, outputs: Outputs) -> tuple[Tensor, ...]:
    named = outputs if isinstance(outputs, Mapping) else dict[str, Tensor]()
    names = named.keys() or {f"a {type(outputs).__name__}"}
    if names != {"y", *op.extra_outputs}:
        expected = ", ".join(("y", *op.extra_outputs))
        raise RuntimeError(f"{type(op).__name__}.fwd returned outputs {', '.join(names)}; expected {expected}")
    return tuple(named[name] for name in ("y", *op.extra_outputs))
