"""The experts of gpt-oss as a problem: with biases, alternating gate and up, and a clamped activation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Problem

LIMIT, ALPHA, LINEAR_OFFSET = 7.0, 1.702, 1.0


class BiasedResult(NamedTuple):
    """The output and the gradients of all inputs."""

    y: Tensor
    x: Tensor
    scales: Tensor
    w1: Tensor
    w2: Tensor
    b1: Tensor
    b2: Tensor


@dataclass(frozen=True)
class GptOssProblem(Problem):
    """``y = scales * (activation(x W1^T + b1) W2^T + b2)`` by expert; columns of gate and up alternate."""

    b1: Tensor  # [E, 2F]
    b2: Tensor  # [E, K]

    @classmethod
    def of(cls, problem: Problem) -> GptOssProblem:
        """Adds random biases to a problem; rows of its first weights count as alternating gate and up."""
        generator = torch.Generator(problem.x.device).manual_seed(1)
        experts, columns, features = problem.w1.shape

        def draw(width: int) -> Tensor:
            bias = torch.randn(experts, width, generator=generator, device=problem.x.device)
            return (0.1 * bias).to(problem.x.dtype)

        values = {field.name: getattr(problem, field.name) for field in fields(Problem)}
        return cls(**values, b1=draw(columns), b2=draw(features))

    def _truth(self, group: int, rows: slice) -> BiasedResult:
        """The result of one expert in float64."""
        leaves = (self.x[rows], self.scales[rows], *(t[group] for t in (self.w1, self.w2, self.b1, self.b2)))
        x, scales, w1, w2, b1, b2 = operands = [t.detach().double().requires_grad_() for t in leaves]
        with torch.enable_grad():
            hidden = activate(x @ w1.mT + b1)
            y = (hidden @ w2.mT + b2) * scales.unsqueeze(-1)
        return BiasedResult(y.detach(), *torch.autograd.grad(y, operands, self.dy[rows].double()))


def activate(preact: Tensor) -> Tensor:
    """The hidden rows [T, F] of rows [T, 2F] with alternating gate and up."""
    gate, up = preact[:, ::2].clamp(max=LIMIT), preact[:, 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + LINEAR_OFFSET)
