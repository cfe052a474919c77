"""Routed layers that are replayed, on the emulated kernels: the bits of the first call, for whatever tokens come."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from emulation import build
from test_replay import Runs, runs, same
from torch import Tensor

from fusible import (
    Combine,
    Dispatch,
    Float8Weight,
    GroupedLinear,
    GroupedLoRA,
    Int4,
    Scale,
    Sequential,
    SwiGLU,
    quantize_,
)
from fusible.fuser.replay import guards
from fusible.ops.formats.weight_only import WeightOnly
from fusible.ops.kernels.doors import low_rank

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
__all__ = ["runs"]

E, K, F, T, SLOTS = 5, 16, 24, 7, 2


class Layer:
    """A layer and what it is called with."""

    def __init__(self, *before: Any, scale: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        options = {"bias": False, "dtype": torch.bfloat16, **options}
        self.fc1, self.fc2 = GroupedLinear(E, K, 2 * F, **options), GroupedLinear(E, F, K, **options)
        scales = [Scale()] if scale else []
        self.model = Sequential(Dispatch(E), self.fc1, SwiGLU(), *before, self.fc2, *scales, Combine())
        self.give()

    def give(self, tokens: int = T) -> None:
        self.x = torch.randn(tokens, K, dtype=torch.bfloat16).requires_grad_()
        self.index = torch.randint(E + 1, (tokens, SLOTS))  # some are of no expert
        self.weights = torch.rand(tokens, SLOTS).requires_grad_()
        self.dy = torch.randn(tokens, K, dtype=torch.bfloat16)

    def forward(self, model: Any = None) -> Tensor:
        y: Tensor = (model or self.model)(self.x, top_k_index=self.index, top_k_weights=self.weights)
        return y

    def step(self, model: Any = None) -> list[Tensor]:
        """The output and all gradients."""
        leaves = [self.x, self.weights, *(model or self.model).parameters()]
        for leaf in leaves:
            leaf.grad = None
        y = self.forward(model)
        y.backward(self.dy)
        return [y.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    def anew(self) -> list[Tensor]:
        """The results of :meth:`step` in a copy, which has no state of earlier calls."""
        return self.step(deepcopy(self.model))

    def warm(self) -> None:
        for _ in range(3):
            self.step()


LAYERS: list[Callable[[], Layer]] = [
    Layer,
    lambda: Layer(transposed_weight=True),
    lambda: Layer(single_grouped_weight=False),
    lambda: Layer(Scale(), scale=False),
]


@pytest.mark.parametrize("make", LAYERS)
def test_a_third_step_is_replayed_bit_by_bit(runs: Runs, make: Callable[[], Layer]) -> None:
    layer = make()
    first = layer.step()
    assert [step.name for step in layer.model.explain().steps] == ["RoutedMLP"]
    layer.step()
    layer.step()

    again: list[Tensor] = []
    assert runs.of(lambda: again.extend(layer.step())) == (0, 2)
    assert same(again, first)


def test_a_replay_sorts_more_slots_than_its_captures(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 4096 slots are sorted without a workspace. Replays of such captures must get one for more slots."""
    monkeypatch.setattr(guards, "_MULTIPLES_FROM", T)
    layer = Layer()
    for tokens in (T, T + 3, T + 5, 2100):
        layer.give(tokens)
        expected, got = layer.anew(), list[Tensor]()
        count = runs.of(lambda got=got: got.extend(layer.step()))
        assert same(got, expected)

    assert count == (0, 2)


class LayerWithAdapters(Layer):
    """Frozen experts whose adapters are trained."""

    def __init__(self, up_rank: int, down_rank: int) -> None:
        super().__init__()
        up = GroupedLoRA(E, K, 2 * F, up_rank, bias=False, dtype=torch.bfloat16)
        down = GroupedLoRA(E, F, K, down_rank, bias=False, dtype=torch.bfloat16)
        for name, parameter in [*up.named_parameters(), *down.named_parameters()]:
            torch.nn.init.normal_(parameter)
            parameter.requires_grad_("lora" in name)
        self.model = Sequential(Dispatch(E), up, SwiGLU(), down, Scale(), Combine())


def check_replays(layer: Layer, runs: Runs) -> list[Tensor]:
    """Steps of several numbers of tokens have the bits of calls anew, the last as a replay; returns its results."""
    for tokens in (T, T + 3, 40, T + 3, 40):
        layer.give(tokens)
        expected, got = layer.anew(), list[Tensor]()
        count = runs.of(lambda got=got: got.extend(layer.step()))
        assert same(got, expected)

    assert count == (0, 2)
    return got


@pytest.mark.parametrize("passes", [frozenset(), low_rank.ALL_PASSES], ids=["products", "passes"])
@pytest.mark.parametrize("ranks", [(8, 16), (8, 0), (0, 72)])
def test_a_layer_with_adapters_is_replayed_bit_by_bit(
    runs: Runs, ranks: tuple[int, int], passes: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "PASSES", passes)
    layer = LayerWithAdapters(*ranks)
    layer.warm()
    assert [step.name for step in layer.model.explain().steps] == ["RoutedLoRA"]
    results = check_replays(layer, runs)
    assert len(results) == 3 + 2 * sum([rank > 0 for rank in ranks])


@pytest.mark.parametrize("format", [Int4(8), Float8Weight("rows")], ids=repr)
def test_adapters_over_bytes_are_replayed_bit_by_bit(runs: Runs, format: WeightOnly) -> None:
    """Their weights are decoded in each replay."""
    layer = LayerWithAdapters(8, 16)
    quantize_(layer.model, format)
    layer.warm()
    check_replays(layer, runs)


def test_other_tokens_are_read(runs: Runs) -> None:
    layer = Layer()
    layer.warm()
    layer.give()
    expected, got = layer.anew(), list[Tensor]()

    assert runs.of(lambda: got.extend(layer.step())) == (0, 2)
    assert same(got, expected)


def test_each_number_of_tokens_is_replayed(runs: Runs) -> None:
    layer = Layer()
    for tokens in (T, T + 3, 1, 40, T + 3, T, 40, 1) * 2:
        layer.give(tokens)
        expected, got = layer.anew(), list[Tensor]()
        count = runs.of(lambda got=got: got.extend(layer.step()))
        assert same(got, expected)

    assert count == (0, 2)


def test_a_number_of_tokens_that_is_new_is_replayed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have more rows than there are tokens; of few tokens, their number could be a multiple by chance."""
    monkeypatch.setattr(guards, "_MULTIPLES_FROM", T)
    layer = Layer()
    for tokens in (T, T + 3, T + 5, 40):
        layer.give(tokens)
        expected, got = layer.anew(), list[Tensor]()
        count = runs.of(lambda got=got: got.extend(layer.step()))
        assert same(got, expected)

    assert count == (0, 2)


@pytest.mark.parametrize("bias", [False, True])
def test_a_call_without_gradients_is_one_launch_and_replayed(runs: Runs, bias: bool) -> None:
    layer = Layer(bias=bias)
    expected = layer.forward().detach()
    with torch.no_grad():
        outputs: list[Tensor] = []
        counts = [runs.of(lambda: outputs.append(layer.forward())) for _ in range(3)]

    assert counts == [(1, 0), (1, 0), (0, 1)]
    assert same(outputs, [expected] * 3)
    layer.give()
    with torch.no_grad():
        assert runs.of(lambda: outputs.append(layer.forward())) == (0, 1)
    assert same(outputs[3:], [layer.forward().detach()])


def test_a_replaced_weight_is_read(runs: Runs) -> None:
    layer = Layer()
    with torch.no_grad():
        for _ in range(3):
            layer.forward()
        layer.fc1.weight = torch.nn.Parameter(torch.randn_like(layer.fc1.weight))
        found = [layer.forward() for _ in range(3)]
        expected = layer.forward(deepcopy(layer.model))

    assert same(found, [expected] * 3)


def test_main_grads_are_added_to_by_replays(runs: Runs) -> None:
    layer, sums = Layer(accumulate_into_main_grad=True), list[list[Tensor]]()
    for p in layer.model.parameters():
        p.main_grad = torch.zeros(p.shape)
    for _ in range(4):
        count = runs.of(lambda: layer.step())
        sums.append([p.main_grad.clone() for p in layer.model.parameters()])

    assert count == (0, 2)
    for once, four in zip(sums[0], sums[3], strict=True):
        torch.testing.assert_close(four, 4 * once)
