"""Which activation the experts of a transformers model have: read off the module, never off its configuration.

A model's own gate is known by its name here; whether the gate is still what that name stood for is then tried out on
numbers. What is not known, or has changed, runs as it is, between two grouped linears.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from ..fuser import Op
from ..fuser.config import constant
from ..fuser.overrides import is_hooked
from ..ops import GLU, Activation, interleaved

_ACTIVATIONS: dict[str, str] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "relu": "relu",
    "ReLUSquaredActivation": "relu2",
    "Sigmoid": "sigmoid",
    "sigmoid": "sigmoid",
}


def _clamped(limit: str, alpha: str | None, offset: float, **options: Any) -> Callable[[nn.Module], GLU]:
    """A clamped silu gate, whose constants are attributes of the module."""

    def build(experts: nn.Module) -> GLU:
        slope = 1.0 if alpha is None else float(getattr(experts, alpha))
        return GLU("silu", limit=float(getattr(experts, limit)), alpha=slope, linear_offset=offset, **options)

    return build


def _usual_gate(experts: Any) -> GLU | None:
    """The gate of most models, ``act_fn(gate) * up``; None if the activation is not supported."""
    name = activation_name(experts.act_fn)
    return None if name is None else GLU(name)


_GATES: dict[str, Callable[[nn.Module], GLU | None]] = {
    "BeamExperts": _usual_gate,
    "GptOssExperts": _clamped("limit", "alpha", 1.0, layout=interleaved(1)),
    "OpenAIPrivacyFilterExperts": _clamped("limit", "alpha", 1.0),
    "MiniMaxM3VLExperts": _clamped("swiglu_limit", "swiglu_alpha", 1.0),
    "DeepseekV4Experts": _clamped("limit", None, 0.0),
    "HYV4Experts": _clamped("swiglu_limit", None, 0.0),
    "Glm5NextTextExperts": _clamped("swiglu_limit", None, 0.0),
}
_IN_FLOAT32 = ("BeamExperts",)  # whatever the dtype of the rows is; kernels do the same, and round once


def activation_of(experts: nn.Module) -> tuple[Op | None, str]:
    """The op that stands for what is between the two linears; or None, and why it has to run as it is."""
    act = getattr(experts, "act_fn", None)
    if "_apply_gate" in vars(experts) or (isinstance(act, nn.Module) and is_hooked(act)):
        return None, "this module's _apply_gate was replaced, or its act_fn has hooks"
    if not getattr(experts, "has_gate", True):
        name = activation_name(experts.act_fn)
        return (None, _unsupported(experts)) if name is None else (Activation(name), "")
    gate = getattr(type(experts), "_apply_gate", None)
    if getattr(gate, "__name__", None) == "_default_apply_gate":
        op = _usual_gate(experts)
        return op, "" if op else _unsupported(experts)
    return _gate_of_class(experts)


@constant
def spec_of(
    kind: type[nn.Module],
    gate: Any,
    has_gate: bool,
    constants: tuple[tuple[str, float | None], ...],
    act: Any,
    approximate: Any,
) -> tuple[Any, ...] | None:
    """The op that :func:`activation_of` finds for experts with these values, as those of its spec; None: it finds none.

    Args:
        kind, gate: the class of the experts, and its ``_apply_gate``.
        has_gate, constants: their attributes; None: there is none.
        act: their activation: a function, the class of a module, or None.
        approximate: that of the module.
    """
    like: Any = object.__new__(kind)
    nn.Module.__init__(like)
    for name, value in (("has_gate", has_gate), *constants):
        if value is not None:
            setattr(like, name, value)
    if isinstance(act, type):
        if not act.__module__.startswith(("torch.nn.", "transformers.")) or act.__name__ not in {*_ACTIVATIONS, "GELU"}:
            return None
        act = act() if approximate is None else act(approximate=approximate)
    like.act_fn = act
    if getattr(kind, "_apply_gate", None) is not gate:
        return None
    op: Any = activation_of(like)[0]
    return None if op is None else astuple(op.spec)


def activation_name(function: Any) -> str | None:
    """The name here of an activation, a module or a function; None if it is not supported."""
    if isinstance(function, nn.GELU) and type(function) is nn.GELU:
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    name = _ACTIVATIONS.get(_name(function))
    if name is None or not _agrees(function, Activation(name), 1.0):
        return None
    return name


def _gate_of_class(experts: nn.Module) -> tuple[Op | None, str]:
    kind = next((base.__name__ for base in type(experts).__mro__ if "_apply_gate" in vars(base)), "")
    if kind not in _GATES:
        return None, f"{kind}._apply_gate is not known here"
    op = _GATES[kind](experts)
    if op is None:
        return None, _unsupported(experts)
    tolerance = 1e-6 if kind in _IN_FLOAT32 else 1e-9
    if not _agrees(experts._apply_gate, op, 2 * (op.spec.limit or 1.0), tolerance):
        return None, f"{kind}._apply_gate, with this act_fn, is not what is known of it here"
    return op, ""


def _unsupported(experts: Any) -> str:
    return f"{_name(experts.act_fn)} is not a supported activation"


def _agrees(function: Any, op: Activation | GLU, reach: float, tolerance: float = 1e-9) -> bool:
    """Whether a function without parameters and an op give the same numbers and slopes.

    They are tried out in a thread of their own, which is in none of the modes that a model's first call may be in:
    inference, checkpointing, a trace, fake tensors, a device.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_same, function, op, reach, tolerance).result()


def _same(function: Any, op: Activation | GLU, reach: float, tolerance: float) -> bool:
    results = [_values_and_slopes(f, reach) for f in (function, op)]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*results, strict=True))


def _values_and_slopes(function: Any, reach: float) -> tuple[Tensor, Tensor]:
    """Of rows of numbers on both sides of everything that a gate may treat in its own way."""
    numbers = torch.linspace(-4 * reach, 4 * reach, 512, dtype=torch.float64, device="cpu")
    apart = torch.arange(64, device="cpu") * 37 % 64  # gate and up of a pair are far from one another
    x = numbers.view(8, 64)[:, apart].requires_grad_()
    y = function(x.clone())  # no leaf, of which hooks on all modules may make something else
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)
