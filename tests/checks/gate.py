"""Checks of the products of a router's gate against float64, on a GPU or its emulation."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.ops.routed.gate import Gate

SIZES = [(1, 64, 8), (33, 128, 60), (64, 256, 128), (300, 200, 264), (7, 96, 896)]  # T, H, E
BF16 = torch.bfloat16


def tensors(device: str, tokens: int, hidden: int, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, a weight, a bias, and the gradient of the logits."""
    torch.manual_seed(tokens)
    shapes = (tokens, hidden), (experts, hidden), (experts,), (tokens, experts)
    x, weight, bias, dy = (torch.randn(shape).to(device) for shape in shapes)
    return x.to(BF16).requires_grad_(), weight.to(BF16).requires_grad_(), bias, dy


def step(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    """The logits, and the gradients of tokens and weight."""
    logits = Gate()(x, weight=weight, logit_bias=bias)
    return [logits.detach(), *torch.autograd.grad(logits, [x, weight], dy)]


def check(device: str, sizes: tuple[int, int, int]) -> None:
    """Logits within the rounding of float32 sums; a gradient of 16 bits within one rounding, after 2^-16."""
    operands = tensors(device, *sizes)
    ours, true = step(*operands), step(*[t.detach().double().requires_grad_() for t in operands])
    size = [t.detach().double().abs() for t in operands]
    sums = [size[0] @ size[1].T + size[2], size[3] @ size[1], size[3].T @ size[0]]

    assert [t.dtype for t in ours] == [torch.float32, BF16, BF16]
    for out, right, most, depth in zip(ours, true, sums, (sizes[1], sizes[2], sizes[0]), strict=True):
        half = 0.0 if out.dtype == torch.float32 else 2.0**-8
        bound = most * (depth * 2.0**-24 + 2.0**-16 * (half > 0)) + half * right.abs()
        assert ((out.double() - right).abs() <= bound * 1.001).all()


def check_alone(device: str) -> None:
    """The logits of a token depend on no other."""
    x, weight, bias, _ = (t.detach() for t in tensors(device, 300, 128, 128))
    whole = Gate()(x, weight=weight, logit_bias=bias)
    for tokens in (1, 7, 64, 129):
        assert torch.equal(Gate()(x[:tokens], weight=weight, logit_bias=bias), whole[:tokens])
