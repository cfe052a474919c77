"""A way to compute a :class:`Problem` that benchmarks time, and the parts that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from .problem import Result


@dataclass(frozen=True)
class Contestant:
    """A forward, and the leaves that its backward differentiates: x, scales, then W1 and W2, whole or by expert.

    Attributes:
        rounding: the relative error of its operands before the products; 0 for the rounding of their dtype.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    dy: Tensor
    rounding: float = field(default=0.0, kw_only=True)

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        """The gradients, from the result of a forward."""
        return torch.autograd.grad(y, self.leaves, self.dy)

    def step(self) -> tuple[Tensor, ...]:
        """Runs a forward and a backward."""
        y = self.forward()
        return y.detach(), *self.backward(y)

    def infer(self) -> Tensor:
        """Runs a forward alone."""
        with torch.no_grad():
            return self.forward()

    def result(self) -> Result:
        """The result of a step, with the gradients of each weight in one tensor."""
        y, x, scales, *weights = self.step()
        count = len(weights) // 2
        w1, w2 = (torch.stack(w) if count > 1 else w[0] for w in (weights[:count], weights[count:]))
        return Result(y, x, scales, w1.view(-1, *w1.shape[-2:]), w2.view(-1, *w2.shape[-2:]))


@dataclass(frozen=True)
class InterleavedContestant(Contestant):
    """A contestant whose W1 alternates rows of gate and up, as :func:`interleaved` gives them."""

    def result(self) -> Result:
        """The result in the order of other contestants: rows of the gate first."""
        result = super().result()
        return result._replace(w1=separated(result.w1))


def interleaved(w1: Tensor) -> Tensor:
    """Reorders [E, 2F, K] from gate rows first to rows gate, up, gate, up."""
    return w1.view(w1.shape[0], 2, -1, w1.shape[2]).transpose(1, 2).flatten(1, 2)


def separated(w1: Tensor) -> Tensor:
    """The inverse of :func:`interleaved`."""
    return w1.view(w1.shape[0], -1, 2, w1.shape[2]).transpose(1, 2).flatten(1, 2)


def swiglu(pre: Tensor, scales: Tensor) -> Tensor:
    """The activation and its scale, op by op."""
    gate, up = pre.chunk(2, -1)
    return (F.silu(gate) * up * scales.unsqueeze(-1)).to(pre.dtype)


def leaf(tensor: Tensor) -> Tensor:
    """A leaf on the same memory, with its own gradient."""
    return tensor.detach().requires_grad_()
