"""What a linear under ``Float8Tensor(delayed=...)`` carries from step to step, in buffers.

A training forward is a step of x and of the weight, a backward one of the gradient of y. What a backward computes again
has the scales of the last forward, so its bytes are the same, and counts as no step. Nor does a forward without
gradients, as that of a teacher, unless it is the first one of a reentrant checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...fuser.contract import tracing as trace
from ...fuser.contract.torch_private import current_graph_task, is_without_gradients
from ...fuser.replay import capture
from ..formats.formats import E4M3, FORMATS
from ..formats.per_tensor import DelayedScales, amax_by_group
from ..formats.recipe import Float8Tensor, Recipe
from ..formats.reference import amax_of

_TENSORS = ("x", "weight", "gradient")
BUFFERS = tuple([f"{tensor}_{kept}" for tensor in _TENSORS for kept in ("amax_history", "encode")])


def is_delayed(recipe: Recipe | None) -> bool:
    """Whether scales come from steps before."""
    return isinstance(recipe, Float8Tensor) and recipe.delayed is not None


def register(linear: nn.Module, recipe: Recipe | None, groups: int, device: torch.device | str | None) -> None:
    """Gives a linear the buffers of its recipe: ``x_amax_history`` [history, E] and ``x_encode`` [E], and so on."""
    if not isinstance(recipe, Float8Tensor) or recipe.delayed is None:
        return
    for tensor in _TENSORS:
        first = DelayedScales.first(groups, recipe.delayed, None if device is None else torch.device(device))
        linear.register_buffer(f"{tensor}_amax_history", first.history)
        linear.register_buffer(f"{tensor}_encode", first.encode)


def has_buffers(linear: nn.Module) -> bool:
    """Whether a linear keeps scales of steps before."""
    return "x_encode" in linear._buffers


def encode_of_tokens(
    linear: nn.Module, recipe: Recipe, x: Tensor, split_sizes: Tensor, is_gradient: bool = False
) -> Tensor | None:
    """What the values of each group are multiplied by, float32 [E]; None: scales come from ``x`` itself."""
    if not isinstance(recipe, Float8Tensor) or recipe.delayed is None:
        return None
    capture.refuse("PyTorch advances the scales of steps before")
    tensor = "gradient" if is_gradient else "x"
    if is_gradient or _is_step(linear):
        _advance(linear, tensor, recipe, amax_by_group(x, split_sizes))
    return linear.get_buffer(f"{tensor}_encode")


def scales_of_forward(linear: nn.Module, recipe: Recipe | None) -> Tensor | None:
    """What the last forward has multiplied the values of x by, which its backward may need after other forwards."""
    return linear.get_buffer("x_encode").clone() if is_delayed(recipe) else None


def encode_of_weight(linear: nn.Module, recipe: Recipe, weight: Tensor) -> Tensor | None:
    """As :func:`encode_of_tokens`, of a weight [E, N, K]."""
    if not isinstance(recipe, Float8Tensor) or recipe.delayed is None:
        return None
    if _is_step(linear):
        _advance(linear, "weight", recipe, amax_of(weight, (1, 2)).flatten())
    return linear.get_buffer("weight_encode")


def _is_step(linear: nn.Module) -> bool:
    return linear.training and current_graph_task() == -1 and not is_without_gradients()


@torch.no_grad()
def _advance(linear: nn.Module, tensor: str, recipe: Float8Tensor, amax: Tensor) -> None:
    """Scales for this step, from those before; and the amaxes of this one."""
    assert recipe.delayed is not None
    if trace.active() or amax.is_meta:
        return
    history, encode = linear.get_buffer(f"{tensor}_amax_history"), linear.get_buffer(f"{tensor}_encode")
    format = FORMATS[recipe.gradient] if tensor == "gradient" else E4M3
    state = DelayedScales(history, encode).next(recipe.delayed, format, recipe.scales == "power_of_two").seen(amax)
    history.copy_(state.history)
    encode.copy_(state.encode)
