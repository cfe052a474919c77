"""Counts of tokens that train, since the last update of the selection bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...fuser.contract.config import constant
from ...fuser.contract.torch_private import current_graph_task


class _AddWhenTrained(torch.autograd.Function):
    """Returns ``y`` unchanged. When its gradient passes, ``counts`` are added to ``load``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, counts: Tensor, load: Tensor) -> Tensor:
        ctx.counts, ctx.load = counts, load  # saved tensors of a checkpoint would be computed again
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.load.add_(ctx.counts)
        return dy, None, None


def _added_when_trained(y: Tensor, counts: Tensor, load: Tensor) -> Tensor:
    counted: Tensor = _AddWhenTrained.apply(y, counts, load)  # type: ignore[no-untyped-call]
    return counted


@constant
def _register_with_dynamo() -> None:
    """Registers the call as a node of the graph when it is first traced. Dynamo warns of autograd functions."""
    torch.compiler.allow_in_graph(_added_when_trained)  # type: ignore[no-untyped-call]


class TokenCount(nn.Module):
    """Counts the tokens of a layer that train, each once, however often a checkpoint runs their forward.

    A forward that records gradients counts at once. A forward inside a backward is a recomputation: it counts when the
    gradient of its output passes. That happens only under reentrant checkpoints, whose first forward ran under
    ``no_grad``. In compiled code every forward counts when the gradient passes. Evaluation, ``no_grad``, and frozen
    layers without a gradient of their input do not count.

    Attributes:
        load: int64, of the shape of the counts. It is no buffer: DDP broadcasts buffers, FSDP casts them, and averaged
            models average them.
    """

    load: Tensor

    def __init__(self, shape: tuple[int, ...], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.load = torch.zeros(shape, dtype=torch.int64, device=device)

    def counts(self, y: Tensor) -> bool:
        """Whether a gradient may pass the output ``y`` of a call."""
        return self.training and y.requires_grad

    def forward(self, y: Tensor, counts: Tensor) -> Tensor:
        """Returns the output ``y`` of a layer, to be used in its place; ``counts``, int64, are those of the call."""
        if not self.counts(y):
            return y
        load = self.load_on(counts.device)
        if torch.compiler.is_dynamo_compiling():
            _register_with_dynamo()
        elif current_graph_task() == -1:
            load.add_(counts)
            return y
        return _added_when_trained(y, counts, load)

    def load_on(self, device: torch.device) -> Tensor:
        """The load, moved to this device; zeros if it had no data, as it is in no state dict."""
        if self.load.device != device:
            without_data = "meta" in (self.load.device.type, device.type)
            self.load = torch.zeros_like(self.load, device=device) if without_data else self.load.to(device)
        return self.load

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies ``.to()`` and the like; only changes the device."""
        self.load_on(fn(torch.empty(0, device=self.load.device)).device)
        applied: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return applied
