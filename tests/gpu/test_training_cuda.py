"""A grouped linear alone trains through our kernels as it does through the fallback; the truth is float64 on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from checks.device import needs_hopper
from reference import grouped_linear
from torch import Tensor

from fusible import GroupedLinear, config

E, K, N, T, STEPS = 8, 264, 200, 1024, 20
TINY = torch.finfo(torch.bfloat16).eps / 32
BF16 = torch.bfloat16
Forward = Callable[..., Tensor]  # of rows, sizes, weight=, bias=


class Batch(NamedTuple):
    """The inputs of one step, exact in bfloat16."""

    x: Tensor
    sizes: list[int]
    target: Tensor


class Run(NamedTuple):
    """The results of a training; one gradient of x per step."""

    losses: Tensor
    input_grads: list[Tensor]
    parameters: dict[str, Tensor]


def start() -> dict[str, Tensor]:
    """Weight and bias at the start."""
    return {"weight": torch.randn(E, N, K).mul(K**-0.5).bfloat16(), "bias": torch.randn(E, N).bfloat16()}


def batches() -> list[Batch]:
    """Ragged groups, another one empty in each step, and a tail; the targets are those of another layer, and noise."""
    teacher = {name: t.double() for name, t in start().items()}
    found = []
    for step in range(STEPS):
        shares = torch.rand(E).exp().mul(torch.rand(E) > 0.2)
        shares[step % E] = 0
        sizes = (shares / shares.sum().clamp(min=1) * (T - 7 * step)).long().tolist()
        x = torch.randn(T, K).bfloat16()
        target = grouped_linear(x.double(), sizes, **teacher) + 0.1 * torch.randn(T, N, dtype=torch.float64)
        found.append(Batch(x, sizes, target.bfloat16()))
    return found


def train(
    parameters: dict[str, Tensor], data: list[Batch], forward: Forward, device: str, dtype: torch.dtype = BF16
) -> Run:
    """Momentum on master copies in float32 or wider; ``forward`` sees them rounded to ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    masters = {name: t.to(device, wide) for name, t in parameters.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=20.0, momentum=0.8)
    losses, input_grads = [], []
    for x, sizes, target in data:
        leaves = {name: t.detach().to(dtype, copy=True).requires_grad_() for name, t in masters.items()}
        rows, valid = x.to(device, dtype, copy=True).requires_grad_(), sum(sizes)
        y = forward(rows, sizes, **leaves)
        loss = (y[:valid].to(wide) - target[:valid].to(device, wide)).square().mean()
        loss.backward()
        for name, master in masters.items():
            master.grad = leaves[name].grad.to(wide)
        optimizer.step()
        losses.append(loss.detach().double())
        input_grads.append(rows.grad[:valid].double().cpu())
    return Run(torch.stack(losses).cpu(), input_grads, {name: t.double().cpu() for name, t in masters.items()})


def layer(backend: str, device: str) -> Forward:
    """A forward through :class:`GroupedLinear`, whose parameters are the tensors that it is given."""
    op = GroupedLinear(E, K, N, device=device, dtype=BF16)

    def forward(rows: Tensor, sizes: list[int], **leaves: Tensor) -> Tensor:
        with config(backend=backend):
            keywords = {"split_sizes": torch.tensor(sizes, device=device)}
            return torch.func.functional_call(op, leaves, (rows,), keywords)

    return forward


def error(tensor: Tensor, truth: Tensor) -> float:
    return float((tensor - truth).norm() / truth.norm())


def assert_learns_as_well(ours: Run, fallback: Run, truth: Run) -> None:
    """Every loss, gradient and parameter is at most twice as far from the truth as the fallback's, and a little."""
    worst = float((fallback.losses / truth.losses - 1).abs().max())
    apart = (ours.losses / truth.losses - 1).abs()
    assert float(apart.max()) <= 2 * worst + TINY, f"losses are off by {apart.tolist()}, the fallback's by {worst}"
    for step, (got, theirs, exact) in enumerate(
        zip(ours.input_grads, fallback.input_grads, truth.input_grads, strict=True)
    ):
        assert error(got, exact) <= 2 * error(theirs, exact) + TINY, f"gradient of x in step {step}"
    for name, exact in truth.parameters.items():
        assert error(ours.parameters[name], exact) <= 2 * error(fallback.parameters[name], exact) + TINY, name


def test_a_grouped_linear_trains_as_plain_torch_does() -> None:
    data, parameters = batches(), start()
    ours, plain = (train(parameters, data, forward, "cpu") for forward in (layer("loop", "cpu"), grouped_linear))
    truth = train(parameters, data, grouped_linear, "cpu", torch.float64)

    assert truth.losses[-1] < truth.losses[0] / 4
    assert_learns_as_well(ours, plain, truth)


@pytest.mark.cuda
@needs_hopper
def test_a_grouped_linear_trains_as_through_the_fallback() -> None:
    data, parameters = batches(), start()
    ours, fallback = (train(parameters, data, layer(name, "cuda"), "cuda") for name in ("hopper", "grouped_mm"))
    truth = train(parameters, data, grouped_linear, "cpu", torch.float64)

    assert_learns_as_well(ours, fallback, truth)
