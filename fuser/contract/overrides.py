"""User code on a single module: hooks, or its own ``forward``, ``fwd`` or ``bwd``.

It runs in a container as it runs alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .op import Op


def is_hooked(module: nn.Module) -> bool:
    """Whether the module has hooks, or a patched ``forward``, which run only where the module itself is called."""
    # hooks_of, inlined: this runs for every op at every call, and `any` would add two calls
    after, before = module._forward_hooks or module._backward_hooks, module._forward_pre_hooks
    return bool(after or before or module._backward_pre_hooks or "forward" in module.__dict__)


def overrides_forward(module: nn.Module) -> bool:
    """Whether calling an op does something else than running its ``fwd`` and ``bwd``."""
    return "forward" in module.__dict__ or type(module).forward is not Op.forward


def input_may_change(module: nn.Module) -> bool:
    """Whether its ``fwd`` and ``bwd`` may get other arguments than a call of the module."""
    return bool(module._forward_pre_hooks) or overrides_forward(module)


def is_called_whole(op: Op) -> bool:
    """Whether an op must be called as a module, because its hooks or its own ``forward`` run only then."""
    return is_hooked(op) or overrides_forward(op)


def outputs_of(op: Op, label: str, result: object) -> tuple[object, ...]:
    """All outputs of an op, from the result of calling it: a hook or its own ``forward`` may return anything.

    Raises:
        RuntimeError: the op has extra outputs, and the result is not a tuple of all of them.
    """
    if not op.extra_outputs:
        return (result,)
    names = "y", *op.extra_outputs
    if isinstance(result, (tuple, list)) and len(result) == len(names):
        return tuple(result)
    came = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
    raise RuntimeError(
        f"{label}: expected its outputs ({', '.join(names)}) as a tuple, got {came}; "
        "a forward hook, or a forward of its own, must return all of them"
    )


def patched_half(op: Op) -> str | None:
    """The name of a half that was set on the object instead of its class, or None."""
    return next((method for method in ("fwd", "bwd") if method in op.__dict__), None)


def hooks_of(module: nn.Module) -> tuple[Mapping[int, object], ...]:
    """The hooks that run where the module is called, by kind."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
