"""A checkpoint recomputes under the switches of its forward, in whichever thread the backward runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusible import Float8Row, GroupedLinear, NoRecipe, Scale, Sequential, SwiGLU, config

E, K, F, T = 3, 32, 64, 40
BF16 = torch.bfloat16


class Experts(torch.nn.Module):
    """Experts whose output a normalisation reads, so that its backward is the first to ask for what was kept."""

    def __init__(self) -> None:
        super().__init__()
        up, down = GroupedLinear(E, K, 2 * F, dtype=BF16), GroupedLinear(E, F, K, dtype=BF16)
        self.experts = Sequential(up, SwiGLU(), Scale(), down)
        self.norm = torch.nn.LayerNorm(K, dtype=BF16)

    def forward(self, x: Tensor, sizes: Tensor, scales: Tensor) -> Tensor:
        y: Tensor = self.norm(self.experts(x, split_sizes=sizes, scales=scales))
        return y


class Twice(Experts):
    """Changes switches itself: those around it hold for the first call alone."""

    def forward(self, x: Tensor, sizes: Tensor, scales: Tensor) -> Tensor:
        y = super().forward(x, sizes, scales)
        with config(recipe=NoRecipe()):
            return super().forward(y, sizes, scales)


class Inside(Experts):
    """Its first call is under switches of its own."""

    def forward(self, x: Tensor, sizes: Tensor, scales: Tensor) -> Tensor:
        with config(strict=False, disable_fusions={"GroupedMLP"}):
            y = super().forward(x, sizes, scales)
        return super().forward(y, sizes, scales)


def directly(loss: Tensor) -> None:
    loss.backward()


def in_a_thread(loss: Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()


def gradients(
    model: torch.nn.Module, backward: Callable[[Tensor], None], inside: bool, run: Callable[..., Tensor]
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, K, generator=generator).to(BF16).requires_grad_()
    scales, sizes = torch.rand(T, generator=generator).requires_grad_(), torch.tensor([20, 0, 15])
    with config(recipe=Float8Row()):
        loss = run(model, x, sizes, scales).square().sum()
        if inside:
            backward(loss)
    if not inside:
        backward(loss)
    found = [each.grad for each in (x, scales, *model.parameters())]
    model.zero_grad()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("inside", [True, False], ids=["backward in the block", "after the block"])
@pytest.mark.parametrize("backward", [directly, in_a_thread])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("kind", [Experts, Twice, Inside])
def test_recipes(kind: type[Experts], reentrant: bool, backward: Callable[[Tensor], None], inside: bool) -> None:
    model = kind()

    def again(*arguments: Any) -> Tensor:
        return checkpoint(*arguments, use_reentrant=reentrant)  # type: ignore[no-any-return]

    expected = gradients(model, directly, True, lambda model, *arguments: model(*arguments))
    found = gradients(model, backward, inside, again)

    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
