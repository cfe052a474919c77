"""The routed layer as one function of autograd, on the CPU: what it keeps, what it takes, and when it stands aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusible.benchmarks.timing import kept_bytes, peak_bytes
from fusible.integrations import routed
from fusible.ops import routed_backward
from fusible.ops.activations import ActivationSpec
from fusible.ops.routed_mlp import Experts

E, K, F, T, SLOTS = 16, 512, 128, 512, 4
ROWS = T * SLOTS
FLOAT = 4
SMALL = 600_000  # orders, weights of the rows, and one group's rows between the loop's products
SPEC = ActivationSpec("silu", gated=True)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.fixture
def layer() -> tuple[Experts, Tensor, Tensor, Tensor]:
    """Experts, tokens, ids, weights."""
    experts = Experts(tensor(E, 2 * F, K), tensor(E, K, F), None, None, SPEC, False)
    ids = torch.randint(E, (T, SLOTS), generator=torch.Generator().manual_seed(0))
    return experts, tensor(T, K), ids, torch.rand(T, SLOTS).requires_grad_()


def step(layer: Any) -> tuple[Tensor, ...]:
    experts, x, _, weights = layer
    y = routed.run(*layer)
    return torch.autograd.grad(y, [x, weights, *experts[:2]], torch.ones_like(y))


def test_keeps_the_pre_activation_and_not_the_rows(layer: Any) -> None:
    step(layer)
    kept = kept_bytes(lambda: routed.run(*layer))

    assert 0 <= kept - FLOAT * (2 * F * ROWS + K * T) <= SMALL  # and the output


def test_slices_of_rows_live_one_at_a_time(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is at the second weights' gradient: all gradients, the output and that of it, hidden rows, a slice."""
    monkeypatch.setattr(routed_backward, "SLICED_FROM", 1)
    step(layer)
    experts, x, *_ = layer
    weights = sum(p.nbytes for p in experts[:2])
    last = weights + 3 * x.nbytes + FLOAT * ROWS * (F + K // 4)

    assert 0 <= peak_bytes(lambda: step(layer)) - last <= SMALL < FLOAT * ROWS * K // 4


def test_kept_tensors_are_let_go_of_unless_the_graph_stays(layer: Any) -> None:
    y = routed.run(*layer)
    node = y.grad_fn
    torch.autograd.grad(y, layer[1], torch.ones_like(y), retain_graph=True)
    assert node.saved_tensors
    torch.autograd.grad(y, layer[1], torch.ones_like(y))

    with pytest.raises(RuntimeError, match="already been freed"):
        node.saved_tensors  # noqa: B018


def test_differentiating_twice_is_an_error(layer: Any) -> None:
    y = routed.run(*layer)
    (dx,) = torch.autograd.grad(y.square().sum(), layer[1], create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_nothing_is_recorded_where_nothing_is_wanted(layer: Any) -> None:
    experts, x, ids, weights = layer
    plain = Experts(experts.up.detach(), experts.down.detach(), None, None, SPEC, False)

    assert routed.run(plain, x.detach(), ids, weights.detach()).grad_fn is None
