"""Checks of products that do not need one another and are launched so that they overlap, on a GPU or its emulation.

The bits of all results are those of launches that wait for one another, whatever stood in the results before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fusible import GroupedLinear, Sequential
from fusible.ops import kernels
from fusible.ops.kernels import Independent, Layout

from .device import synchronize

POISON = float("nan")


@contextmanager
def apart() -> Iterator[None]:
    """Every product waits for the one before it."""
    with patch.object(Independent, "of", lambda count: None):
        yield


class Backward:
    """The three products behind the gradient of a hidden row, with results that are poisoned before each run."""

    def __init__(
        self, device: str, sizes: tuple[int, ...], k: int, n: int, *, dtype: torch.dtype, wide: bool = False
    ) -> None:
        generator = torch.Generator(device).manual_seed(k + n)
        groups, tokens = len(sizes), sum(sizes) + 37
        self.sizes = torch.tensor(sizes, device=device)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.dy, self.x, self.hidden = draw(tokens, n), draw(tokens, k), draw(tokens, n)
        self.weight = draw(groups, n, k)
        wgrad = torch.float32 if wide else dtype
        self.dx = torch.empty(tokens, k, dtype=dtype, device=device)
        self.dw = torch.empty(groups, n, k, dtype=wgrad, device=device)
        self.dv = torch.empty(groups, k, n, dtype=wgrad, device=device)

    def run(self, independent: Independent | None, accumulate: bool = False) -> list[Tensor]:
        """The results, of which rows of no group stay poisoned."""
        for out in (self.dx, self.dw, self.dv):
            out.fill_(POISON)
        if accumulate:
            self.dw.fill_(0.5), self.dv.fill_(-0.25)
        terms, options = kernels.ADDED if accumulate else kernels.NO_TERMS, {"independent": independent}
        kernels.grouped_gemm(Layout.NN, self.dy, self.weight, self.sizes, out=self.dx, **options)
        kernels.grouped_gemm(Layout.TN, self.dy, self.x, self.sizes, out=self.dw, terms=terms, **options)
        kernels.grouped_gemm(Layout.TN, self.x, self.hidden, self.sizes, out=self.dv, terms=terms, **options)
        return [t.clone() for t in (self.dx, self.dw, self.dv)]


def check_products(device: str, sizes: tuple[int, ...], k: int, n: int, repeats: int = 1, **options: Any) -> None:
    """Bit by bit, with ``=`` and ``+=``."""
    backward = Backward(device, sizes, k, n, **options)
    for accumulate in (False, True):
        want = backward.run(None, accumulate)
        for _ in range(repeats):
            assert_same(backward.run(Independent(3), accumulate), want)
    synchronize(device)


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    """Bit by bit."""
    for one, other in zip(some, others, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def steps(model: Sequential, call: Callable[[], Tensor], count: int = 6) -> list[list[Tensor]]:
    """The gradients of some steps, of which the last ones are replayed where calls are: those of all parameters."""
    gradients = []
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.fill_(0.125)
        x = call()
        main = [p.main_grad.clone() for p in model.parameters() if hasattr(p, "main_grad")]
        gradients.append([x, *main, *[p.grad.clone() for p in model.parameters() if p.grad is not None]])
    return gradients


def with_main_grad(model: Sequential) -> Sequential:
    """Weights whose gradients are added there, in float32."""
    for linear in model.modules():
        if isinstance(linear, GroupedLinear):
            linear.accumulate_into_main_grad = True
            for parameter in linear.expert_parameters("weight"):
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    return model


def check_experts(model: Sequential, device: str, sizes: tuple[int, ...], features: int, count: int = 6) -> None:
    """The backward of experts against the same without overlap, called and replayed."""
    generator = torch.Generator(device).manual_seed(features)
    tokens, dtype = sum(sizes) + 5, next(model.parameters()).dtype
    groups = torch.tensor(sizes, device=device)
    rows, dy = (torch.randn(tokens, features, generator=generator, device=device).to(dtype) for _ in range(2))
    scales = torch.rand(tokens, generator=generator, device=device)

    def call() -> Tensor:
        x = rows.clone().requires_grad_()
        model(x, split_sizes=groups, scales=scales).backward(dy)
        assert x.grad is not None
        return x.grad

    with apart():
        want = steps(model, call, 1)[0]
    for got in steps(model, call, count):
        assert_same(got, want)
    synchronize(device)


def check_chains(
    device: str, sizes: tuple[int, ...], k: int, n: int, repeats: int, captured: Callable[[Any], Any] = lambda run: run
) -> None:
    """Work after the last product reads the results of the first two, and nothing else waits for them.

    Args:
        captured: returns a replacement for calls of a function, such as the replay of a graph.
    """
    backward = Backward(device, sizes, k, n, dtype=torch.bfloat16)

    def run(independent: Independent | None) -> Tensor:
        backward.run(independent)
        return kernels.grouped_gemm(Layout.NT, backward.dx, backward.dw, backward.sizes)  # type: ignore[return-value]

    overlapping, generator = captured(lambda: run(Independent(3))), torch.Generator(device).manual_seed(1)
    for _ in range(repeats):
        backward.dy.copy_(torch.randn(backward.dy.shape, generator=generator, device=device))
        got = overlapping().clone()
        assert_same([got], [run(None)])
