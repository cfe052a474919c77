"""Code that users put on one module: hooks, a ``forward`` or a half of its own. It runs in a container as alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .op import Op


def is_hooked(module: nn.Module) -> bool:
    """Whether the module has hooks, or a patched ``forward``, which run only where the module itself is called."""
    # those of hooks_of, written out: this is asked of every op at every call, and `any` would be two calls more
    after, before = module._forward_hooks or module._backward_hooks, module._forward_pre_hooks
    return bool(after or before or module._backward_pre_hooks or "forward" in module.__dict__)


def has_own_forward(module: nn.Module) -> bool:
    """Whether calling an op does something else than running its halves."""
    return "forward" in module.__dict__ or type(module).forward is not Op.forward


def is_called_whole(op: Op) -> bool:
    """Whether an op must be called as itself: hooks, and a ``forward`` of its own, run nowhere else."""
    return is_hooked(op) or has_own_forward(op)


def patched_half(op: Op) -> str | None:
    """Which half was set on the object itself, instead of its class's; None: neither."""
    return next((half for half in ("fwd", "bwd") if half in op.__dict__), None)


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """The hooks that run where the module is called, by kind."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
