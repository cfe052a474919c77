"""Runs one op under autograd: named tensors in, named gradients out. Only this file uses positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import local
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..contract.config import thread_config, use_config
from ..contract.errors import ArgumentError, DoubleBackwardError
from ..contract.op import Keywords, Op
from ..contract.overrides import patched_half
from ..contract.parametrized import foreseen, is_certain
from ..contract.spec import Specs, TensorSpec, check_layout, shape_of
from ..contract.torch_private import (
    apply_of,
    forward_ad_state,
    is_batched_gradient,
    profiler_enabled,
    transforms_active,
)
from .call import BackwardContext, EagerStep, ForwardResult, Node, call_fwd, with_reserved

_NOTHING: frozenset[str] = frozenset()


class StepCapture(Protocol):
    """Captures the steps of a call while they run."""

    def run(self, step: EagerStep, inputs: Sequence[Tensor], flags: tuple[bool, ...], /) -> ForwardResult:
        """Runs the forward of a step on ``inputs[0]`` and captures it; ``inputs`` are autograd's, and so ``flags``."""


class Runtime(NamedTuple):
    """The conditions of a whole call.

    Attributes:
        x_is_inner: for an op that a container calls as a module: whether the container's call has made its x.
    """

    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    x_is_inner: bool = False

    @classmethod
    def of(cls, x: object) -> Runtime:
        if not isinstance(x, Tensor):
            raise ArgumentError(f"x: expected a tensor, got a {type(x).__name__}")
        kind = x.device.type
        if autocasts(kind):
            return cls(torch.is_grad_enabled(), torch.get_autocast_dtype(kind))
        return _RECORDING if torch.is_grad_enabled() else _NOT_RECORDING


class Caller(local):
    """Whether a step of a container is calling an op as a module, with an x that the container's call has made."""

    x_is_inner = False


caller = Caller()


@contextmanager
def calling(x_is_inner: bool) -> Iterator[None]:
    """A context in which a container calls an op as a module."""
    before, caller.x_is_inner = caller.x_is_inner, x_is_inner
    try:
        yield
    finally:
        caller.x_is_inner = before


_RECORDING, _NOT_RECORDING = Runtime(True, None), Runtime(False, None)


def autocasts(device_type: str) -> bool:
    """Whether operations on such a device run under autocast."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def run(
    op: Op,
    x: Tensor,
    keywords: Keywords,
    runtime: Runtime,
    input_names: tuple[str, ...] | None = None,
    session: StepCapture | None = None,
    x_is_inner: bool = False,
) -> tuple[Tensor, ...]:
    """Applies ``op``; records it for autograd if anything that it reads requires a gradient.

    Args:
        input_names: ``op.input_names()`` of an earlier call, where the caller keeps them.
        session: captures it.
        x_is_inner: whether the call has made ``x``.

    Returns:
        ``y``, then the extra outputs in the order of ``op.extra_outputs``.
    """
    if transforms_active():
        refuse_transforms([op])
    if forward_ad_state._current_level >= 0:
        _refuse_tangents(op, [x, *keywords.values(), *op.input_tensors()])
    if op.promises.passes_x_on and patched_half(op) is None:
        return (x, *[x.view_as(x) if runtime.grad_enabled else x.detach() for _ in op.extra_outputs])
    if runtime.grad_enabled:
        names, tensors = _differentiable(op, x, keywords, input_names)
        for tensor in tensors:
            if tensor.requires_grad:
                shapes = () if op.promises.replayable else (*map(shape_of, tensors),)
                step = EagerStep(op, keywords, runtime.autocast_dtype, names, x_is_inner, shapes)
                return apply(partial(step.run, x) if session is None else partial(session.run, step, tensors), *tensors)
    if session is None:  # no state of the backward is needed
        return call_fwd(op, x, keywords, _NOTHING, runtime.autocast_dtype, x_is_inner)[0]
    return session.run(EagerStep(op, keywords, runtime.autocast_dtype, (), x_is_inner), [x], ()).outputs


def check(op: Op, x: TensorSpec, keywords: Keywords, runtime: Runtime) -> Specs:
    """``op.check`` with the reserved names that it declares, after a check of the layout of ``x``."""
    if x.layout not in op.layouts:
        check_layout("x", x.layout, op.layouts)
    return op.check(x, **with_reserved(op, "check", keywords, _NOTHING, runtime.autocast_dtype))


def check_foreseen(op: Op, x: TensorSpec, keywords: Keywords, runtime: Runtime) -> Specs:
    """:func:`check` before the parameters are computed; None if only their values can decide."""
    try:
        return check(foreseen(op), x, keywords, runtime)
    except Exception as error:
        if isinstance(error, ArgumentError) and is_certain(op):
            raise
        return None  # it is checked again with the values


def check_without_x(op: Op, keywords: Keywords) -> None:
    """``op.check_without_x``; checks that need the values of computed parameters are postponed."""
    try:
        foreseen(op).check_without_x(**keywords)
    except ArgumentError:
        if is_certain(op):
            raise


def refuse_transforms(modules: Iterable[object]) -> None:
    """Raises if a transform is active, which no op supports; its tensors have no values to check."""
    if transforms_active():
        for name in [type(module).__name__ for module in modules if isinstance(module, Op)]:
            raise RuntimeError(f"{name}: torch.func transforms and vmap are not supported; use torch.autograd")


def _refuse_tangents(op: Op, values: Iterable[object]) -> None:
    """Raises if forward-mode AD has given a tensor a tangent, which kernels would drop."""
    if any(forward_ad.unpack_dual(v).tangent is not None for v in values if isinstance(v, Tensor)):  # type: ignore[no-untyped-call]
        raise RuntimeError(f"{type(op).__name__}: forward-mode gradients are not supported; use backward()")


def differentiable(op: Op, x: Tensor, keywords: Keywords) -> dict[str, Tensor]:
    """The tensors whose gradients autograd may want, by name."""
    return dict(zip(*_differentiable(op, x, keywords, None), strict=True))


def _differentiable(
    op: Op, x: Tensor, keywords: Keywords, input_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], list[Tensor]]:
    names, tensors = ["x"], [x]
    for name, value in keywords.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not op.keywords[name].buffer:
            names.append(name)
            tensors.append(value)
    if not (op._parameters or op._modules) and type(op).input_tensors is Op.input_tensors:
        return (*names,), tensors
    inputs = op.input_tensors()
    if input_names is None or len(input_names) != len(inputs):
        input_names = op.input_names()
    return (*names, *input_names), tensors + inputs


class _OpNode(Node, Protocol):
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    lent: Sequence[Tensor]
    context: BackwardContext
    input_ids: frozenset[int]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _OpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OpNode, run: Callable[..., ForwardResult], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, kept, apart, ctx.lent, ctx.context = run(ctx.needs_input_grad[1:])
        ctx.save_for_backward(*kept, *apart)
        ctx.input_ids = frozenset(map(id, tensors))
        return outputs

    @staticmethod
    def backward(ctx: _OpNode, *douts: Tensor) -> tuple[Tensor | None, ...]:
        context, kind = ctx.context, douts[0].device.type
        differentiated = torch.is_grad_enabled()
        anchors = _anchors(ctx, douts) if differentiated else ()
        is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        try:
            if not (differentiated or is_autocast or context.config is not thread_config.config or profiler_enabled()):
                return None, *context.gradients([*ctx.saved_tensors], ctx.lent, douts, ctx)
            with _BackwardScope(context, kind):
                grads = context.gradients([*ctx.saved_tensors], ctx.lent, douts, ctx)
        except RuntimeError as error:
            _explain_batched(context, douts, error)
            raise
        if differentiated:
            grads = _FirstOrderOnly.guard(type(context.op).__name__, grads, anchors)
        return None, *grads


def _anchors(ctx: _OpNode, douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors on which gradients depend; one of them requires a gradient if a second derivative is not zero.

    A saved tensor that ``fwd`` computed, such as a pre-activation, depends on inputs, which autograd does not know.
    """
    saved, number = ctx.saved_tensors, ctx.context.number
    residuals = saved[:number] if ctx.context.sources else saved  # the others are parameters
    is_computed = any(t.is_floating_point() and id(t) not in ctx.input_ids for t in residuals)
    stand_in = (douts[0].new_empty(0).requires_grad_(),) if is_computed else ()
    return (*douts, *saved, *stand_in)


def _explain_batched(context: BackwardContext, douts: Sequence[Tensor], error: RuntimeError) -> None:
    """Explains a failed backward of batched gradients; no transform is active there that could be refused."""
    if any(is_batched_gradient(dout) for dout in douts):
        name = type(context.op).__name__
        raise RuntimeError(f"{name}: batched gradients (is_grads_batched, vectorize) are not supported") from error


apply = apply_of(_OpFunction)
"""Without the look at every argument for remains of ``torch.func``, whose transforms :func:`run` refuses."""


class _BackwardScope(ExitStack):
    """The scope of a backward that does not run in it anyway: the switches of its forward, no recording or autocast."""

    def __init__(self, context: BackwardContext, device_type: str) -> None:
        super().__init__()
        self.enter_context(torch.no_grad())
        if autocasts(device_type):
            self.enter_context(torch.autocast(device_type, enabled=False))
        self.enter_context(use_config(context.config))
        if profiler_enabled():
            self.enter_context(torch.profiler.record_function(f"fusible::{type(context.op).__name__}.bwd"))


class _NamedNode(Protocol):
    name: str


class _FirstOrderOnly(torch.autograd.Function):
    """Passes gradients on, and raises a named error if they are differentiated again."""

    @staticmethod
    def forward(ctx: _NamedNode, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: _NamedNode, *_: Tensor) -> tuple[None, ...]:
        raise DoubleBackwardError(f"{ctx.name} has first-order gradients only: its backward cannot be differentiated")

    @classmethod
    def guard(cls, name: str, grads: list[Tensor | None], anchors: tuple[Tensor, ...]) -> list[Tensor | None]:
        present = [g for g in grads if g is not None]
        guarded = iter(cls.apply(name, len(present), *present, *anchors))  # type: ignore[no-untyped-call]
        return [None if g is None else next(guarded) for g in grads]
