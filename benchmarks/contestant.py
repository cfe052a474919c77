"""A way to compute a :class:`Problem`, as the benchmarks time it, and what several of the ways are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .problem import GLUS, Result


@dataclass(frozen=True)
class Contestant:
    """A forward, and the leaves whose gradients its backward gives: x, scales, then W1 and W2, whole or by expert.

    Attributes:
        rounding: the relative error that its operands have before anything is multiplied; 0: that of their dtype.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    dy: Tensor
    rounding: float = field(default=0.0, kw_only=True)

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        """The gradients, from what a forward gave."""
        return torch.autograd.grad(y, self.leaves, self.dy)

    def step(self) -> tuple[Tensor, ...]:
        """A forward and a backward."""
        y = self.forward()
        return y.detach(), *self.backward(y)

    def infer(self) -> Tensor:
        """A forward alone."""
        with torch.no_grad():
            return self.forward()

    def result(self) -> Result:
        """What a step gives, the gradients of the experts' weights in one tensor each."""
        y, x, scales, *weights = self.step()
        count = len(weights) // 2
        w1, w2 = (torch.stack(w) if count > 1 else w[0] for w in (weights[:count], weights[count:]))
        return Result(y, x, scales, w1.view(-1, *w1.shape[-2:]), w2.view(-1, *w2.shape[-2:]))


@dataclass(frozen=True)
class InterleavedContestant(Contestant):
    """A contestant whose W1 has rows of gate and up by turns, as :func:`interleaved` gives them."""

    def result(self) -> Result:
        """The same as others give: rows of the gate first."""
        result = super().result()
        return result._replace(w1=separated(result.w1))


def interleaved(w1: Tensor) -> Tensor:
    """[E, 2F, K] with rows gate, up, gate, up, from rows of the gate first."""
    return w1.view(w1.shape[0], 2, -1, w1.shape[2]).transpose(1, 2).flatten(1, 2)


def separated(w1: Tensor) -> Tensor:
    """The opposite of :func:`interleaved`."""
    return w1.view(w1.shape[0], -1, 2, w1.shape[2]).transpose(1, 2).flatten(1, 2)


def activated(glu: str, pre: Tensor, scales: Tensor) -> Tensor:
    """The activation and its scale, op by op."""
    gate, up = pre.chunk(2, -1)
    return (GLUS[glu](gate, up) * scales.unsqueeze(-1)).to(pre.dtype)


def leaf(tensor: Tensor) -> Tensor:
    """The same memory, with a gradient of its own."""
    return tensor.detach().requires_grad_()
