"""The memory that a RoutedMLP keeps for its backward, which frees each tensor after the last reader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import Combine, Dispatch, GroupedLinear, Scale, Sequential, SwiGLU
from fusible.benchmarks.timing import kept_bytes, peak_bytes
from fusible.ops.kernels.doors import gathered_wgrad
from fusible.ops.kernels.pytorch import few_rows

E, K, F, T, SLOTS = 16, 512, 128, 512, 4
ROWS = T * SLOTS
FLOAT = 4
SMALL = 800_000  # orders, weights of the rows, and one group's rows between the loop's products
GROUP = 300_000  # more of one group: the product in front of an activation, in float32, and its gradients


@pytest.fixture(autouse=True)
def rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows stand for larger ones, which are not held all at once between a product and its activation."""
    monkeypatch.setattr(few_rows, "FEW_BYTES", 0)


class Layer:
    """A layer and what it is called with."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.fc1, self.fc2 = (GroupedLinear(E, *s, bias=False, **options) for s in ((K, 2 * F), (F, K)))
        self.model = Sequential(Dispatch(E), self.fc1, SwiGLU(), self.fc2, Scale(), Combine())
        self.x = torch.randn(T, K).requires_grad_()
        self.weights, self.index = torch.rand(T, SLOTS).requires_grad_(), torch.randint(E, (T, SLOTS))
        self.dy = torch.randn(T, K)
        self.leaves = [self.x, self.weights, *self.model.parameters()]

    def forward(self) -> Tensor:
        y: Tensor = self.model(self.x, top_k_index=self.index, top_k_weights=self.weights)
        return y

    def step(self) -> list[Tensor]:
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        return [*torch.autograd.grad(self.forward(), wanted, self.dy)]

    @property
    def parameter_bytes(self) -> int:
        return self.fc1.weight.nbytes + self.fc2.weight.nbytes


def test_keeps_the_pre_activation_and_not_the_rows() -> None:
    layer = Layer()
    layer.step()
    kept = kept_bytes(layer.forward)

    assert 0 <= kept - FLOAT * (2 * F * ROWS + K * T) <= SMALL  # and the output


def test_peak_is_at_the_second_weights_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients, the output, hidden rows and a slice of the rows: the rest is gone by then."""
    monkeypatch.setattr(gathered_wgrad, "SLICED_FROM", 1)
    layer = Layer()
    layer.step()
    last = layer.parameter_bytes + 2 * layer.x.nbytes + FLOAT * ROWS * (F + K // 4)

    assert 0 <= peak_bytes(layer.step) - last <= SMALL < FLOAT * ROWS * K // 4


def test_peak_without_gradients_of_weights_is_in_front_of_the_activation() -> None:
    """Kept pre-activations, the rows of dy, the gradients of the pre-activations; and the output."""
    layer = Layer()
    layer.fc1.weight.requires_grad_(False)
    layer.fc2.weight.requires_grad_(False)
    layer.step()
    most = layer.x.nbytes + FLOAT * ROWS * (2 * F + K + 2 * F)

    assert 0 <= peak_bytes(layer.step) - most <= SMALL + GROUP


def test_slices_write_into_main_grads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as large as a weight is allocated: the peak is in front of the activation, hidden rows included."""
    monkeypatch.setattr(gathered_wgrad, "SLICED_FROM", 1)
    layer = Layer(accumulate_into_main_grad=True)
    for weight in (layer.fc1.weight, layer.fc2.weight):
        weight.main_grad = torch.zeros_like(weight)

    def step() -> None:
        layer.forward().backward(layer.dy)
        layer.x.grad = None

    step()
    most = layer.x.nbytes + FLOAT * ROWS * (2 * F + K + 2 * F + F)

    assert 0 <= peak_bytes(step) - most <= SMALL + GROUP


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": False}, {"transposed_weight": True}], ids=str)
def test_slices_give_the_same_bits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one parameter or one for each expert, into autograd's gradients or ``main_grad``, now or later."""
    for delivery in ("accumulate_into_main_grad", "delay_wgrad_compute", None):
        layer = Layer(**options, **({delivery: True} if delivery else {}))
        found = []
        for sliced_from in (1 << 40, 1):
            monkeypatch.setattr(gathered_wgrad, "SLICED_FROM", sliced_from)
            for p in layer.model.parameters():
                p.main_grad, p.grad = torch.ones_like(p), None
            layer.forward().backward(layer.dy)
            for fc in (layer.fc1, layer.fc2):
                fc.backward_dw()
            gives = "main_grad" if delivery == "accumulate_into_main_grad" else "grad"
            found.append([getattr(p, gives) for p in layer.model.parameters()])

        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), delivery
        assert all(float(p.abs().sum()) > 0 for p in found[0])


def test_delayed_gradients_keep_tokens_rather_than_rows() -> None:
    layer = Layer(delay_wgrad_compute=True)

    def step() -> None:
        layer.x.grad = layer.weights.grad = None
        layer.forward().backward(layer.dy)

    step()
    for fc in (layer.fc1, layer.fc2):
        fc.backward_dw()
    layer.x.grad = layer.weights.grad = None
    kept = kept_bytes(step)

    assert 0 <= kept - FLOAT * (3 * F * ROWS + K * T) <= SMALL  # gradients of pre-activations, hidden rows; x.grad


def test_saved_tensors_are_let_go_of_unless_the_graph_stays() -> None:
    layer = Layer()
    y = layer.forward()
    node = y.grad_fn
    first = torch.autograd.grad(y, layer.leaves, layer.dy, retain_graph=True)
    assert node.saved_tensors
    second = torch.autograd.grad(y, layer.leaves, layer.dy)

    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="already been freed"):
        node.saved_tensors  # noqa: B018
