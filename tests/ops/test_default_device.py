"""Calls whose tensors lie on another device than torch's default, as ``torch.set_default_device`` sets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import (
    NVFP4,
    Combine,
    Dispatch,
    Float8Block,
    Float8Tensor,
    GroupedLinear,
    MoE,
    Pointwise,
    Scale,
    Sequential,
    SwiGLU,
    config,
)
from fusible.ops.kernels.pytorch import wrong_sizes

E, H, F = 4, 128, 64
IDS, WEIGHTS = torch.tensor([[0, 3], [3, 2], [1, 2]]), torch.tensor([[0.5, 0.25]] * 3)
ROUTES = {"top_k_index": IDS, "top_k_weights": WEIGHTS}
SIZES = {"split_sizes": torch.tensor([2, 0, 1, 0])}
Case = tuple[Callable[[], torch.nn.Module], dict[str, Tensor]]


def experts(activation: Callable[[], Any] = SwiGLU, first: tuple[Any, ...] = (), last: tuple[Any, ...] = ()) -> Any:
    width = 2 * F if activation is SwiGLU else F
    up, down = GroupedLinear(E, H, width, bias=True, device="cpu"), GroupedLinear(E, F, H, device="cpu")
    return Sequential(*first, up, activation(), *last[:1], down, *last[1:])


def function() -> Pointwise:
    slope = 1.5
    return Pointwise(lambda x: x * torch.sigmoid(x * slope) * 2.0**-3)


CASES: dict[str, Case] = {
    "grouped": (experts, SIZES),
    "function": (lambda: experts(function), SIZES),
    "routed": (lambda: experts(first=(Dispatch(E),), last=(Scale(), Combine())), ROUTES),
    "layer": (lambda: MoE(H, F, experts=E, top_k=2, bias_update_rate=0.1, balance_loss=0.1, device="cpu"), {}),
}
RECIPES = [None, Float8Block(), Float8Tensor(), NVFP4()]


@pytest.fixture
def elsewhere() -> Iterator[Callable[[], None]]:
    """Sets a default device on which nothing can be computed."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


def trained(name: str, recipe: Any) -> list[Tensor]:
    """The output and the gradient of x of a new layer."""
    make, arguments = CASES[name]
    torch.manual_seed(0)
    wrong_sizes._reports.clear()
    layer = make() if recipe is None else make().bfloat16()
    x = torch.linspace(-1, 1, 3 * H, device="cpu").view(3, H).to(next(layer.parameters()).dtype).requires_grad_()
    with config(recipe=recipe):
        y = layer(x, **arguments)
        y = y if isinstance(y, Tensor) else y.y
        y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("name", CASES)
def test_calls(name: str, recipe: Any, elsewhere: Callable[[], None]) -> None:
    expected = trained(name, recipe)
    elsewhere()
    assert all(map(torch.equal, trained(name, recipe), expected))


def test_reports_of_wrong_sizes(elsewhere: Callable[[], None]) -> None:
    sizes = torch.tensor([2, -1])
    elsewhere()
    report = wrong_sizes.SizeReport(torch.device("cpu"))
    report.look_at(sizes, 3)
    assert report._on_host.tolist() == [2, -1]
