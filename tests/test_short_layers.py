"""Short calls of a routed layer on a CPU, without gradients: what the fusion gives kernel by kernel."""

from __future__ import annotations

import pytest
import torch

from fusible import Combine, Dispatch, GroupedLinear, Scale, Sequential, SwiGLU, config
from fusible.ops.kernels.pytorch import loop
from fusible.ops.kernels.pytorch import routed_mlp as short_layer

E, H, F = 6, 16, 8


def layer(dtype=torch.float32, experts=E, features=H, **options):
    fc1 = GroupedLinear(experts, features, 2 * F, bias=False, dtype=dtype, **options)
    fc2 = GroupedLinear(experts, F, features, bias=False, dtype=dtype, **options)
    return Sequential(Dispatch(experts), fc1, SwiGLU(), fc2, Scale(), Combine())


def arguments(tokens, slots=2, dtype=torch.float32, experts=E, features=H, ids=torch.int64):
    index = torch.rand(tokens, experts).argsort(-1)[:, :slots].to(ids)
    return {
        "x": torch.randn(tokens, features, dtype=dtype),
        "top_k_index": index,
        "top_k_weights": torch.rand(tokens, slots),
    }


@pytest.fixture
def runs(monkeypatch):
    """Counts the layers that are run in one call."""
    count, run = [], short_layer.run
    monkeypatch.setattr(short_layer, "run", lambda *args: count.append(1) or run(*args))
    return count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
        {"experts": 64},
        {"features": 10},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_of_kernel_by_kernel(tokens, options, transposed, runs):
    model, call = layer(**options, transposed_weight=transposed), arguments(tokens, **options)
    with torch.no_grad():
        y = model(**call)
    assert len(runs) == 1
    assert torch.equal(y, model(**call))  # with gradients
    assert len(runs) == 1


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_ids_of_no_expert_add_nothing(ids, runs):
    model, call = layer(), arguments(9, ids=ids)
    call["top_k_index"][2] = E
    call["top_k_index"][5, 1] = E + 3
    with torch.no_grad():
        y = model(**call)

    assert len(runs) == 1
    assert y[2].eq(0).all()
    assert torch.equal(y, model(**call))


def test_one_slot_a_token(runs):
    model, call = layer(), arguments(7, slots=1)
    with torch.no_grad():
        assert torch.equal(model(**call), model.requires_grad_()(**call))
    assert runs


@pytest.mark.parametrize("case", ["many rows", "no rows", "the loop", "strided"])
def test_other_calls_run_kernel_by_kernel(case, runs):
    model = layer()
    call = arguments({"many rows": loop.SPAN, "no rows": 0}.get(case, 5))
    if case == "strided":
        call["x"] = torch.randn(H, 5).mT
    with torch.no_grad(), config(backend="loop" if case == "the loop" else "auto"):
        y = model(**call)

    assert not runs
    assert torch.equal(y, model(**call))


def test_calls_of_shapes_that_have_passed_are_not_checked_again(monkeypatch):
    model, checked = layer(), []
    check = SwiGLU.check
    monkeypatch.setattr(SwiGLU, "check", lambda self, x: checked.append(1) or check(self, x))
    for tokens in (3, 3, 5, 3):
        model(**arguments(tokens))

    assert len(checked) == 2
