"""``config(recompute=True)``: fused experts keep their input in place of the pre-activation, and give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from models import mlp
from torch import Tensor, nn

from fusible import (
    ClampedSwiGLU,
    Combine,
    Dispatch,
    Float8Block,
    GroupedLinear,
    Scale,
    Sequential,
    SwiGLU,
    config,
)

E, K, F, T, TOP_K = 3, 16, 24, 20, 2
SIZES = [7, 0, 11]  # and a tail


class Layer(NamedTuple):
    """A model, what it is called with, and the tensors whose gradients are compared."""

    model: Sequential
    call: Callable[[], Tensor]
    leaves: list[Tensor]

    def step(self) -> list[Tensor]:
        y = self.call()
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        return [y, *torch.autograd.grad(y, wanted, dy)]


def experts(dtype: torch.dtype = torch.float32, act: nn.Module | None = None, **options: Any) -> Layer:
    torch.manual_seed(0)
    model = mlp(E, K, F, act=act, dtype=dtype, **options)
    x, scales = torch.randn(T, K, dtype=dtype).requires_grad_(), torch.rand(T).requires_grad_()
    sizes = torch.tensor(SIZES)
    return Layer(model, lambda: model(x, split_sizes=sizes, scales=scales), [x, scales, *model.parameters()])


def scaled_biases() -> Layer:
    torch.manual_seed(0)
    fc1, fc2, scale = GroupedLinear(E, K, 2 * F, scale_bias=True), GroupedLinear(E, F, K, scale_bias=True), Scale()
    model = Sequential(fc1, SwiGLU(), fc2, scale)
    x, *numbers = torch.randn(T, K).requires_grad_(), *(torch.rand(T).requires_grad_() for _ in range(3))
    keywords = {fc1: {"bias_scale": numbers[0]}, fc2: {"bias_scale": numbers[1]}, scale: {"scales": numbers[2]}}
    sizes = torch.tensor(SIZES)
    return Layer(model, lambda: model(x, split_sizes=sizes, op_kwargs=keywords), [x, *numbers, *model.parameters()])


def routed(**options: Any) -> Layer:
    torch.manual_seed(0)
    model = Sequential(Dispatch(E), *mlp(E, K, F, scaled=False, **options), Scale(), Combine())
    x, weights = torch.randn(T, K).requires_grad_(), torch.rand(T, TOP_K).requires_grad_()
    index = torch.randint(E, (T, TOP_K))
    return Layer(model, lambda: model(x, top_k_index=index, top_k_weights=weights), [x, weights, *model.parameters()])


LAYERS: dict[str, Callable[[], Layer]] = {
    "experts": experts,
    "bf16": lambda: experts(torch.bfloat16),
    "one parameter an expert": lambda: experts(single_grouped_weight=False, single_grouped_bias=False),
    "weights stored transposed": lambda: experts(transposed_weight=True),
    "clamped": lambda: experts(act=ClampedSwiGLU()),
    "scaled biases": scaled_biases,
    "routed": routed,
    "routed, one parameter an expert": lambda: routed(single_grouped_weight=False),
}


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        yield kept


def assert_bitwise_the_same(layer: Layer) -> None:
    expected = layer.step()
    with config(recompute=True):
        got = layer.step()
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_gives_the_same_bits(name: str, fused: bool) -> None:
    layer = LAYERS[name]()
    with config(disable_fusions=() if fused else {"GroupedMLP", "RoutedMLP"}):
        assert_bitwise_the_same(layer)
        assert (layer.model.explain().steps[0].name in ("GroupedMLP", "RoutedMLP")) == fused


@pytest.mark.parametrize("make", [experts, routed])
def test_keeps_no_rows_of_the_pre_activation(make: Callable[[], Layer]) -> None:
    layer, rows = make(), T * TOP_K if make is routed else T
    with saved_tensors() as before:
        layer.call()
    with config(recompute=True), saved_tensors() as after:
        layer.call()

    assert (rows, 2 * F) in {tuple(t.shape) for t in before}
    given = {leaf.data_ptr() for leaf in layer.leaves}
    large = [t for t in after if t.is_floating_point() and t.numel() > rows and t.data_ptr() not in given]
    assert not large


@pytest.mark.parametrize("make", [experts, routed])
@pytest.mark.parametrize("frozen", range(6))
def test_frozen_parts(make: Callable[[], Layer], frozen: int) -> None:
    layer = make()
    layer.leaves[frozen].requires_grad_(False)
    assert_bitwise_the_same(layer)


@pytest.mark.parametrize("make", [experts, routed])
def test_only_one_gradient_is_wanted(make: Callable[[], Layer]) -> None:
    for wanted in range(6):
        layer = make()
        for leaf in layer.leaves:
            leaf.requires_grad_(leaf is layer.leaves[wanted])
        assert_bitwise_the_same(layer)


def test_a_backward_obeys_the_switches_of_its_forward() -> None:
    layer = experts()
    expected = layer.step()[1:]
    with config(recompute=True):
        y = layer.call()
    dy = torch.linspace(-1, 1, y.numel()).view_as(y)
    for _ in range(2):
        got = torch.autograd.grad(y, layer.leaves, dy, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_input_that_was_overwritten_is_an_error() -> None:
    layer = experts()
    layer.model[0].weight.requires_grad_(False)
    with config(recompute=True):
        y = layer.call()
    with torch.no_grad():
        layer.leaves[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_for_main_grad() -> None:
    grads = []
    for recompute in (False, True):
        layer = experts(accumulate_into_main_grad=True)
        weights = [layer.model[0].weight, layer.model[3].weight]
        for weight in weights:
            weight.main_grad = torch.ones_like(weight)
        with config(recompute=recompute):
            layer.call().square().sum().backward()
        grads.append([weight.main_grad for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert not grads[0][0].eq(1).all()


@pytest.mark.parametrize("make", [experts, routed])
def test_explained(make: Callable[[], Layer]) -> None:
    layer, rows = make(), TOP_K if make is routed else 1
    layer.call()
    before = layer.model.explain()
    with config(recompute=True):
        layer.call()
        after = layer.model.explain()

    assert before.saved_bytes_per_row - after.saved_bytes_per_row == pytest.approx(4 * 2 * F * rows, rel=0.01)
    assert "recompute: the pre-activation is computed again in the backward" in str(after)
    assert "recompute" not in str(before)


def test_quantised_experts_keep_what_they_do() -> None:
    torch.manual_seed(0)
    model = mlp(E, 128, 128, dtype=torch.bfloat16, recipe=Float8Block())
    x, scales = torch.randn(T, 128, dtype=torch.bfloat16).requires_grad_(), torch.rand(T).requires_grad_()
    sizes = torch.tensor(SIZES)
    layer = Layer(model, lambda: model(x, split_sizes=sizes, scales=scales), [x, scales, *model.parameters()])

    assert_bitwise_the_same(layer)
    with config(recompute=True):
        layer.call()
        assert "quantised experts keep the pre-activation" in str(model.explain())


def test_compiled() -> None:
    layer = experts()
    expected = layer.step()
    call = torch.compile(layer.model, backend="aot_eager", fullgraph=True)
    x, scales = layer.leaves[:2]
    with config(recompute=True):
        y = call(x, split_sizes=torch.tensor(SIZES), scales=scales)
        dy = torch.linspace(-1, 1, y.numel()).view_as(y)
        got = [y, *torch.autograd.grad(y, layer.leaves, dy)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
