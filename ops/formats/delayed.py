"""Delayed scales: what a linear under ``Float8Tensor(delayed=Delayed())`` carries from step to step, in buffers.

A training forward is a step of x and of the weight, a backward one of the gradient of y. A backward that computes a
forward again takes the scales of the last forward, so its bytes are the same, and counts as no step. Nor does a
forward without gradients, as that of a teacher, unless it is the first one of a reentrant checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...fuser.contract import tracing as trace
from ...fuser.contract.errors import shown
from ...fuser.contract.torch_private import current_graph_task, is_without_gradients
from ...fuser.replay import capture
from .formats import E4M3, Format, power_of_two
from .per_tensor import Float8Tensor, amax_by_group
from .recipe import Steps
from .reference import amax_of

_TENSORS = ("x", "weight", "gradient")


@dataclass(frozen=True)
class Delayed(Steps):
    """A rule for scales: the largest of the last ``history`` amaxes of a tensor, divided by 2 ** ``margin``.

    Raises:
        ValueError: a history that is not positive, a margin that is negative.
    """

    history: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        for name, least in (("history", 1), ("margin", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Delayed: {name} must be an int of at least {least}, got {shown(value)}")

    def buffers(self, groups: int, device: torch.device | None) -> dict[str, Tensor]:
        """``x_amax_history`` [history, E] and ``x_encode`` [E], and so on."""
        buffers: dict[str, Tensor] = {}
        for tensor in _TENSORS:
            first = DelayedScales.first(groups, self, device)
            buffers |= {f"{tensor}_amax_history": first.history, f"{tensor}_encode": first.encode}
        return buffers

    def advanced(
        self, recipe: Float8Tensor, linear: nn.Module, tensor: str, values: Tensor, split_sizes: Tensor | None
    ) -> Float8Tensor:
        if tensor != "weight":
            capture.refuse("PyTorch advances the scales of steps before")
        if tensor == "gradient" or _is_step(linear):
            amax = amax_of(values, (1, 2)).flatten() if split_sizes is None else amax_by_group(values, split_sizes)
            self._advance(recipe, linear, tensor, amax)
        return recipe.with_scales(linear.get_buffer(f"{tensor}_encode"))

    @torch.no_grad()
    def _advance(self, recipe: Float8Tensor, linear: nn.Module, tensor: str, amax: Tensor) -> None:
        """Scales for this step, from those before; and the amaxes of this one."""
        if trace.active() or amax.is_meta:
            return
        history, encode = linear.get_buffer(f"{tensor}_amax_history"), linear.get_buffer(f"{tensor}_encode")
        format = recipe.format(tensor == "gradient")
        state = DelayedScales(history, encode).next(self, format, recipe.is_power_of_two).seen(amax)
        history.copy_(state.history)
        encode.copy_(state.encode)

    def of_forward(self, linear: nn.Module) -> Tensor:
        return linear.get_buffer("x_encode").clone()


class DelayedScales(NamedTuple):
    """The state of a tensor with delayed scaling between steps.

    Attributes:
        history: float32 [history, E]: row 0 is of the step that runs, the last rows of those before.
        encode: float32 [E], the factors of the values of this step.
    """

    history: Tensor
    encode: Tensor

    @classmethod
    def first(cls, groups: int, delayed: Delayed, device: torch.device | None = None) -> DelayedScales:
        """The state before the first step, with scales of 1."""
        wide = {"dtype": torch.float32, "device": device}  # whatever torch's default dtype is: kernels read these bits
        return cls(torch.zeros(delayed.history, groups, **wide), torch.ones(groups, **wide))  # type: ignore[arg-type]

    def seen(self, amax: Tensor) -> DelayedScales:
        """Returns the state with the amaxes of this step, which may have several calls."""
        return self._replace(history=torch.cat((torch.fmax(self.history[:1], amax.unsqueeze(0)), self.history[1:])))

    def next(self, delayed: Delayed, format: Format = E4M3, is_power_of_two: bool = False) -> DelayedScales:
        """The state for the next step. A scale stays if no amax is positive and finite."""
        amax = self.history.amax(0)
        most = torch.full_like(amax, format.max * 2.0**-delayed.margin)
        encode = torch.where(amax.isfinite() & (amax > 0), most / amax, self.encode)
        encode = encode.clamp(max=torch.finfo(torch.float32).max)
        encode = power_of_two(encode) if is_power_of_two else encode
        rolled = self.history.roll(-1, 0)
        return DelayedScales(torch.cat((torch.zeros_like(rolled[:1]), rolled[1:])), encode)


def _is_step(linear: nn.Module) -> bool:
    """Whether a forward is a step: in training, with gradients, and not inside a backward that recomputes it."""
    return linear.training and current_graph_task() == -1 and not is_without_gradients()
