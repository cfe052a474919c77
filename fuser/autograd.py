"""Runs one op under autograd: named tensors in, named gradients out. Positions exist in this file only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache
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
        if _autocasts(kind):
            return cls(torch.is_grad_enabled(), torch.get_autocast_dtype(kind))
        return _RECORDING if torch.is_grad_enabled() else _NOT_RECORDING


_RECORDING, _NOT_RECORDING = Runtime(True, None), Runtime(False, None)


def _autocasts(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def run(
    op: Op, x: Tensor, keywords: dict[str, Any], runtime: Runtime, input_names: tuple[str, ...] | None = None
) -> tuple[Tensor, ...]:
    """Applies ``op``; records it for autograd if anything that it reads requires a gradient.

    Args:
        input_names: ``op.input_names()`` of an earlier call, where the caller keeps them.

    Returns:
        ``y``, then the extra outputs in the order of ``op.extra_outputs``.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{type(op).__name__}: torch.func transforms and vmap are not supported; use torch.autograd")
    if runtime.grad_enabled:
        names, tensors = _differentiable(op, x, keywords, input_names)
        for tensor in tensors:
            if tensor.requires_grad:
                return _apply(op, keywords, runtime, names, *tensors)
    return call_fwd(op, x, keywords, _NOTHING, runtime.autocast_dtype)[0]


def run_alone(op: Op, x: Tensor, keywords: dict[str, Any]) -> Any:
    """``op(x, **keywords)``: checks, runs, and returns ``y`` or ``(y, *extras)``."""
    given = accepted(op, keywords)
    runtime = Runtime.of(x)
    try:
        check(op, Spec.of(x), given, runtime)
        _check_buffers(op, x, given)
    except ArgumentError as error:
        raise error.located(type(op).__name__) from None
    outputs = run(op, x, given, runtime)
    return outputs if op.extra_outputs else outputs[0]


def accepted(op: Op, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that were given, once it is clear that the op takes them and needs no others."""
    given = {k: v for k, v in keywords.items() if v is not None}
    unknown = given.keys() - op.keywords.keys()
    missing = [k for k, keyword in op.keywords.items() if keyword.required and k not in given]
    if unknown or missing:
        what = f"takes no {', '.join(sorted(unknown))}" if unknown else f"needs {', '.join(missing)}"
        raise ArgumentError(f"{type(op).__name__} {what}; its keywords are: {', '.join(op.keywords) or 'none'}")
    return given


def _check_buffers(op: Op, x: Tensor, keywords: Mapping[str, Any]) -> None:
    lent = tuple(NamedBuffer(repr(k), i) for i, k in enumerate(keywords, 1) if op.keywords[k].buffer)
    if lent:
        inputs = [0, *(i for i, k in enumerate(keywords, 1) if not op.keywords[k].buffer)]
        check_overlaps(lent, inputs, [x, *keywords.values()], op.parameters())


def check(op: Op, x: Spec, keywords: Mapping[str, Any], runtime: Runtime) -> Spec | None:
    """``op.check`` with the reserved names that it declares."""
    return op.check(x, **_with_reserved(op, "check", keywords, _NOTHING, runtime.autocast_dtype))


def call_fwd(
    op: Op, x: Tensor, keywords: Mapping[str, Any], needs_grad: frozenset[str], autocast_dtype: torch.dtype | None
) -> tuple[tuple[Tensor, ...], Any]:
    """``op.fwd`` with the reserved names that it declares: the outputs in order, and ``Saved``."""
    given = _with_reserved(op, "fwd", keywords, needs_grad, autocast_dtype)
    if autocast_dtype is None:
        returned = op.fwd(x, **given)
    else:  # the op casts what it wants cast; torch functions inside must not cast again
        with torch.autocast(x.device.type, enabled=False):
            returned = op.fwd(x, **given)
    if not isinstance(returned, tuple):
        raise RuntimeError(f"{type(op).__name__}.fwd must return (y, Saved), it returned a {type(returned).__name__}")
    result, saved = returned
    return (result,) if isinstance(result, Tensor) else _in_order(op, result), saved


def call_bwd(op: Op, saved: Any, douts: tuple[Tensor, ...], needs_grad: frozenset[str]) -> Grads:
    """``op.bwd`` with the gradients of its outputs, and the reserved names that it declares."""
    extras = dict(zip(op.extra_outputs, douts[1:], strict=True)) if op.extra_outputs else {}
    grads = op.bwd(saved, douts[0], **_with_reserved(op, "bwd", extras, needs_grad, None))
    if not needs_grad <= grads.keys():
        missing = sorted(needs_grad - grads.keys())
        raise RuntimeError(f"{type(op).__name__}.bwd returned no gradient for {missing}; it returned {sorted(grads)}")
    return grads


def differentiable(op: Op, x: Tensor, keywords: Mapping[str, Any]) -> dict[str, Tensor]:
    """What autograd may want the gradient of, by name."""
    return dict(zip(*_differentiable(op, x, keywords, None), strict=True))


def _differentiable(
    op: Op, x: Tensor, keywords: Mapping[str, Any], input_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], list[Tensor]]:
    names, tensors = ["x"], [x]
    for name, value in keywords.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not op.keywords[name].buffer:
            names.append(name)
            tensors.append(value)
    inputs = op.input_tensors()
    if input_names is None or len(input_names) != len(inputs):
        input_names = op.input_names()
    return (*names, *input_names), tensors + inputs


def _with_reserved(
    op: Op, half: str, keywords: Mapping[str, Any], needs_grad: frozenset[str], autocast_dtype: torch.dtype | None
) -> Mapping[str, Any]:
    """The keywords, and those reserved names that ``op.fwd``, ``bwd`` or ``check`` declares."""
    declared = op.reserved[half]
    if not declared:
        return keywords
    given = dict(keywords)
    if "needs_grad" in declared:
        given["needs_grad"] = needs_grad
    if "autocast_dtype" in declared:
        given["autocast_dtype"] = autocast_dtype
    return given


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
        wanted = _wanted(names, ctx.needs_input_grad[4:])
        outputs, saved = call_fwd(op, tensors[0], keywords, wanted, runtime.autocast_dtype)
        kept, rest = pack(saved)
        ctx.save_for_backward(*kept)
        ctx.call = _Call(op, names, wanted, rest, settings.current())
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        tensors, differentiated = ctx.saved_tensors, torch.is_grad_enabled()
        if _is_plain(call, douts[0].device.type):
            grads = _gradients(call, tensors, douts)
        else:
            with _BackwardScope(call, douts[0].device.type):
                grads = _gradients(call, tensors, douts)
        if differentiated:
            grads = _FirstOrderOnly.guard(type(call.op).__name__, grads, (*douts, *tensors))
        return (None, None, None, None, *[grads.get(name) for name in call.names])


_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _OpFunction).apply
"""Without the look at every argument for remains of ``torch.func``, whose transforms :func:`run` refuses."""


class _Call(NamedTuple):
    """What a backward needs besides tensors."""

    op: Op
    names: tuple[str, ...]
    wanted: frozenset[str]
    rest: Any
    config: settings.Config


def _is_plain(call: _Call, device_type: str) -> bool:
    """Whether the backward runs as it must already: without recording, autocast or other switches, and unobserved."""
    return not (
        torch.is_grad_enabled()
        or _autocasts(device_type)
        or call.config is not settings.current()
        or torch._C._autograd._profiler_enabled()
    )


class _BackwardScope(ExitStack):
    """A backward runs under the switches of its forward, without recording and without autocast."""

    def __init__(self, call: _Call, device_type: str) -> None:
        super().__init__()
        self.enter_context(torch.no_grad())
        if _autocasts(device_type):
            self.enter_context(torch.autocast(device_type, enabled=False))
        self.enter_context(settings.using(call.config))
        if torch._C._autograd._profiler_enabled():
            self.enter_context(torch.profiler.record_function(f"fusible::{type(call.op).__name__}.bwd"))


@lru_cache(maxsize=4096)
def _wanted(names: tuple[str, ...], flags: tuple[bool, ...]) -> frozenset[str]:
    return frozenset([name for name, flag in zip(names, flags, strict=True) if flag])


def _gradients(call: _Call, tensors: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    grads = call_bwd(call.op, unpack(call.rest, tensors), douts, call.wanted)
    for name in grads:
        if name not in call.names:
            raise RuntimeError(
                f"{type(call.op).__name__}.bwd returned gradients for {sorted(grads.keys() - set(call.names))}, "
                f"which it does not read; it returned {sorted(grads)}"
            )
    return {name: evaluate(grads[name]) for name in call.names if name in call.wanted}


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
