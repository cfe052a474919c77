"""Runs one op under autograd: named tensors in, named gradients out. Positions exist in this file only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import settings
from .buffers import NamedBuffer, check_overlaps
from .errors import ArgumentError, DoubleBackwardError
from .op import Gradient, Grads, Op, Spec
from .saved import pack, unpack

_NOTHING: frozenset[str] = frozenset()


class Runtime(NamedTuple):
    """What holds for a whole call."""

    grad_enabled: bool
    autocast_dtype: torch.dtype | None

    @classmethod
    def of(cls, x: Tensor) -> Runtime:
        if not isinstance(x, Tensor):
            raise ArgumentError(f"x: expected a tensor, got a {type(x).__name__}")
        kind = x.device.type
        return cls(torch.is_grad_enabled(), torch.get_autocast_dtype(kind) if _autocasts(kind) else None)


def _autocasts(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def run(op: Op, x: Tensor, keywords: Mapping[str, Any], runtime: Runtime) -> tuple[Tensor, ...]:
    """Applies ``op``; records it for autograd if anything that it reads requires a gradient.

    Returns ``y``, then the extra outputs in the order of ``op.extra_outputs``.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{type(op).__name__}: torch.func transforms and vmap are not supported; use torch.autograd")
    named = differentiable(op, x, keywords) if runtime.grad_enabled else {}
    if not any([t.requires_grad for t in named.values()]):
        outputs, _ = call_fwd(op, x, keywords, _NOTHING, runtime.autocast_dtype)
        return outputs
    applied: tuple[Tensor, ...] = _OpFunction.apply(op, keywords, runtime, tuple(named), *named.values())  # type: ignore[no-untyped-call]
    return applied


def run_alone(op: Op, x: Tensor, keywords: dict[str, Any]) -> Any:
    """``op(x, **keywords)``: checks, runs, and returns ``y`` or ``(y, *extras)``."""
    given = {k: v for k, v in keywords.items() if v is not None}
    unknown = given.keys() - op.keywords.keys()
    missing = [k for k, keyword in op.keywords.items() if keyword.required and k not in given]
    if unknown or missing:
        what = f"takes no {', '.join(sorted(unknown))}" if unknown else f"needs {', '.join(missing)}"
        raise ArgumentError(f"{type(op).__name__} {what}; its keywords are: {', '.join(op.keywords) or 'none'}")
    runtime = Runtime.of(x)
    with locating(type(op).__name__):
        check(op, Spec.of(x), given, runtime)
        _check_buffers(op, x, given)
    outputs = run(op, x, given, runtime)
    return outputs if op.extra_outputs else outputs[0]


def _check_buffers(op: Op, x: Tensor, keywords: Mapping[str, Any]) -> None:
    lent = tuple(NamedBuffer(repr(k), i) for i, k in enumerate(keywords, 1) if op.keywords[k].buffer)
    if lent:
        inputs = [0, *(i for i, k in enumerate(keywords, 1) if not op.keywords[k].buffer)]
        check_overlaps(lent, inputs, [x, *keywords.values()], (p for _, p in op.inputs()))


@contextmanager
def locating(where: str) -> Iterator[None]:
    """Puts the op in front of what an :class:`ArgumentError` says."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None


def check(op: Op, x: Spec, keywords: Mapping[str, Any], runtime: Runtime) -> Spec | None:
    """``op.check`` with the reserved names that it declares."""
    return op.check(x, **keywords, **_reserved(op, "check", _NOTHING, runtime.autocast_dtype))


def call_fwd(
    op: Op, x: Tensor, keywords: Mapping[str, Any], needs_grad: frozenset[str], autocast_dtype: torch.dtype | None
) -> tuple[tuple[Tensor, ...], Any]:
    """``op.fwd`` with the reserved names that it declares: the outputs in order, and ``Saved``."""
    reserved = _reserved(op, "fwd", needs_grad, autocast_dtype)
    if autocast_dtype is None:
        returned = op.fwd(x, **keywords, **reserved)
    else:  # the op casts what it wants cast; torch functions inside must not cast again
        with torch.autocast(x.device.type, enabled=False):
            returned = op.fwd(x, **keywords, **reserved)
    if not isinstance(returned, tuple):
        raise RuntimeError(f"{type(op).__name__}.fwd must return (y, Saved), it returned a {type(returned).__name__}")
    result, saved = returned
    return (result,) if isinstance(result, Tensor) else _in_order(op, result), saved


def call_bwd(op: Op, saved: Any, douts: tuple[Tensor, ...], needs_grad: frozenset[str]) -> Grads:
    """``op.bwd`` with the gradients of its outputs, and the reserved names that it declares."""
    extras = dict(zip(op.extra_outputs, douts[1:], strict=True)) if op.extra_outputs else {}
    grads = op.bwd(saved, douts[0], **extras, **_reserved(op, "bwd", needs_grad, None))
    missing = needs_grad - grads.keys()
    if missing:
        raise RuntimeError(
            f"{type(op).__name__}.bwd returned no gradient for {sorted(missing)}; it returned {sorted(grads)}"
        )
    return grads


def differentiable(op: Op, x: Tensor, keywords: Mapping[str, Any]) -> dict[str, Tensor]:
    """What autograd may want the gradient of, by name."""
    named = {"x": x}
    for name, value in keywords.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not op.keywords[name].buffer:
            named[name] = value
    named.update(op.inputs())
    return named


def _reserved(op: Op, half: str, needs_grad: frozenset[str], autocast_dtype: torch.dtype | None) -> dict[str, Any]:
    declared = op.reserved[half]
    if not declared:
        return {}
    values: dict[str, Any] = {"needs_grad": needs_grad, "autocast_dtype": autocast_dtype}
    return {name: values[name] for name in declared}


def _in_order(op: Op, outputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    if outputs.keys() != {"y", *op.extra_outputs}:
        expected = ", ".join(("y", *op.extra_outputs))
        raise RuntimeError(f"{type(op).__name__}.fwd returned outputs {', '.join(outputs)}; expected {expected}")
    return tuple(outputs[name] for name in ("y", *op.extra_outputs))


class _OpFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: Op, keywords: Mapping[str, Any], runtime: Runtime, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        needs = _wanted(names, ctx.needs_input_grad[4:])
        outputs, saved = call_fwd(op, tensors[0], keywords, needs, runtime.autocast_dtype)
        kept, rest = pack(saved)
        ctx.save_for_backward(*kept)
        ctx.call = _Call(op, names, rest, settings.current())
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        wanted = _wanted(ctx.call.names, ctx.needs_input_grad[4:])
        tensors = ctx.saved_tensors
        with _BackwardScope(ctx.call, douts[0].device.type):
            grads = _gradients(ctx.call, tensors, douts, wanted)
        if torch.is_grad_enabled():
            grads = _FirstOrderOnly.guard(type(ctx.call.op).__name__, grads, (*douts, *tensors))
        return (None, None, None, None, *[grads.get(name) for name in ctx.call.names])


class _Call(NamedTuple):
    """What a backward needs besides tensors."""

    op: Op
    names: tuple[str, ...]
    rest: Any
    config: settings.Config


class _BackwardScope(ExitStack):
    """A backward runs under the switches of its forward, without recording and without autocast."""

    def __init__(self, call: _Call, device_type: str) -> None:
        super().__init__()
        if torch.is_grad_enabled():
            self.enter_context(torch.no_grad())
        if _autocasts(device_type):
            self.enter_context(torch.autocast(device_type, enabled=False))
        if call.config is not settings.current():
            self.enter_context(settings.using(call.config))
        if torch._C._autograd._profiler_enabled():
            self.enter_context(torch.profiler.record_function(f"fusible::{type(call.op).__name__}.bwd"))


def _wanted(names: tuple[str, ...], flags: tuple[bool, ...]) -> frozenset[str]:
    return frozenset([name for name, flag in zip(names, flags, strict=True) if flag])


def _gradients(
    call: _Call, tensors: tuple[Tensor, ...], douts: tuple[Tensor, ...], wanted: frozenset[str]
) -> dict[str, Tensor | None]:
    grads = call_bwd(call.op, unpack(call.rest, tensors), douts, wanted)
    unknown = grads.keys() - set(call.names)
    if unknown:
        raise RuntimeError(
            f"{type(call.op).__name__}.bwd returned gradients for {sorted(unknown)}, which it does not read; "
            f"it returned {sorted(grads)}"
        )
    return {name: evaluate(grads[name]) for name in call.names if name in wanted}


def evaluate(gradient: Gradient) -> Tensor | None:
    """Calls a thunk."""
    return gradient() if callable(gradient) and not isinstance(gradient, Tensor) else gradient


class _FirstOrderOnly(torch.autograd.Function):
    """Passes gradients on, and raises a named error when somebody differentiates them again."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise DoubleBackwardError(f"{ctx.name} has first-order gradients only: its backward cannot be differentiated")

    @classmethod
    def guard(cls, name: str, grads: dict[str, Tensor | None], anchors: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
        present = {k: g for k, g in grads.items() if g is not None}
        guarded = cls.apply(name, len(present), *present.values(), *anchors)  # type: ignore[no-untyped-call]
        return {**grads, **dict(zip(present, guarded, strict=True))}
