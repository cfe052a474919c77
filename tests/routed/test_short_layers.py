"""Short calls of a routed layer on a CPU: what the fusion gives kernel by kernel, forward and backward."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from fusible import (
    Activation,
    ClampedSwiGLU,
    Combine,
    Dispatch,
    GroupedLinear,
    Scale,
    Sequential,
    SwiGLU,
    config,
    interleaved,
)
from fusible.ops.kernels.pytorch import few_rows
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
    """Counts the layers that are run in one call; ``runs.off()`` has the next run kernel by kernel."""
    count, run = Runs(monkeypatch), short_layer.run
    monkeypatch.setattr(short_layer, "run", lambda *args: count.append(1) or run(*args))
    return count


class Runs(list):
    def __init__(self, monkeypatch):
        super().__init__()
        self.monkeypatch = monkeypatch

    def off(self):
        self.monkeypatch.setattr(short_layer, "refusal", lambda *args: "shall not run")


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
    assert torch.equal(y, model(**call))  # with gradients
    assert len(runs) == 2
    runs.off()
    assert torch.equal(y, model(**call))
    assert len(runs) == 2


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_ids_of_no_expert_add_nothing(ids, runs):
    model, call = layer(), arguments(9, ids=ids)
    call["top_k_index"][2] = E
    call["top_k_index"][5, 1] = E + 3
    with torch.no_grad():
        y = model(**call)

    assert len(runs) == 1
    assert y[2].eq(0).all()
    runs.off()
    assert torch.equal(y, model(**call))


def test_one_slot_a_token(runs):
    model, call = layer(), arguments(7, slots=1)
    with torch.no_grad():
        y = model(**call)
    assert runs
    runs.off()
    assert torch.equal(y, model(**call))


ACTIVATIONS = {
    "swiglu": SwiGLU,
    "gpt-oss": lambda: ClampedSwiGLU(limit=0.4, layout=interleaved(1)),
    "not gated": lambda: Activation("relu"),
}


def trained(act, bias, transposed, dtype):
    act, options = ACTIVATIONS[act](), {"bias": bias, "dtype": dtype, "transposed_weight": transposed}
    columns = F if isinstance(act, Activation) else 2 * F
    fc1, fc2 = GroupedLinear(E, H, columns, **options), GroupedLinear(E, F, H, **options)
    return Sequential(Dispatch(E), fc1, act, fc2, Scale(), Combine())


def gradients(model, call, dy):
    """The output, and the gradients of all that wants one."""
    leaves = [t for t in (call["x"], call["top_k_weights"], *model.parameters()) if t.requires_grad]
    y = model(**call)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.fixture
def poisoned(monkeypatch):
    """Rows past the last group of a product are NaN."""
    product = torch.nn.functional.grouped_mm

    def poison(a, b, *, offs):
        result = product(a, b, offs=offs)
        if result.dim() == 2:
            result[int(offs[-1]) :] = torch.nan
        return result

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", poison)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradients(act, bias, transposed, dtype, runs, poisoned):
    model, call = trained(act, bias, transposed, dtype), arguments(23, dtype=dtype)
    call["top_k_index"][2] = E
    call["top_k_index"][5, 1] = E + 3
    dy = torch.randn(23, H, dtype=dtype)
    call["x"].requires_grad_()
    call["top_k_weights"].requires_grad_()
    found = gradients(model, call, dy)
    assert len(runs) == 1

    runs.off()
    exact = {k: v.detach().double().requires_grad_(v.requires_grad) for k, v in call.items() if k != "top_k_index"}
    truth = gradients(copy.deepcopy(model).double(), {**call, **exact}, dy.double())
    ordinary = gradients(model, call, dy)
    for ours, theirs, true in zip(found, ordinary, truth, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        allowed = 2 * distance(theirs, true) + 2 * torch.finfo(dtype).eps
        assert distance(ours, true) <= allowed
    assert found[2][[2]].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids", [[[3, 1]], [[1, E]], [[E, E + 1]], [[2]], [[4, 0, 2]]], ids=str)
def test_one_token(ids, dtype, runs, poisoned):
    """Its rows are summed at once where that gives the same bits, and what experts do not have counts as nothing."""
    model, call = trained("swiglu", True, False, dtype), arguments(1, dtype=dtype)
    call["top_k_index"], call["top_k_weights"] = torch.tensor(ids), torch.rand(1, len(ids[0])).requires_grad_()
    call["x"].requires_grad_()
    dy = torch.randn(1, H, dtype=dtype)
    found = gradients(model, call, dy)
    assert len(runs) == 1

    runs.off()
    for name, ours, theirs in zip(("y", *NAMES), found, gradients(model, call, dy), strict=True):
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))


NAMES = ("x", "top_k_weights", "1.weight", "1.bias", "3.weight", "3.bias")


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 5) for c in itertools.combinations(NAMES, n)], ids="+".join)
def test_some_gradients(wanted, runs):
    model, call, dy = trained("swiglu", True, False, torch.float32), arguments(9), torch.randn(9, H)
    for name, tensor in [*call.items(), *model.named_parameters()]:
        if name != "top_k_index":
            tensor.requires_grad_(name in wanted)
    found = gradients(model, call, dy)
    assert len(runs) == (not set(wanted) <= {"3.weight", "3.bias"})

    runs.off()
    for ours, theirs in zip(found, gradients(model, call, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_frozen_weights_keep_no_tokens(runs):
    model, call = trained("swiglu", False, False, torch.float32).requires_grad_(False), arguments(9)
    call["x"] = call["x"].requires_grad_() * 1
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(**call)
    assert runs
    assert all(t.data_ptr() != call["x"].data_ptr() for t in kept)


def test_a_weight_changed_in_between(runs):
    model, call = trained("swiglu", False, False, torch.float32), arguments(9)
    y = model(**call)
    assert runs
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "accumulate_into_main_grad"])
def test_gradients_that_go_elsewhere_are_computed_kernel_by_kernel(option, runs):
    model = layer(**{option: True})
    for linear in (model[1], model[3]):
        linear.weight.main_grad = torch.zeros_like(linear.weight)
    model(**arguments(9)).sum().backward()
    assert not runs


@pytest.mark.parametrize("case", ["many rows", "no rows", "the loop", "strided"])
def test_other_calls_run_kernel_by_kernel(case, runs):
    model = layer()
    call = arguments({"many rows": few_rows.FEW_BYTES // (2 * 4 * H) + 1, "no rows": 0}.get(case, 5))
    if case == "strided":
        call["x"] = torch.randn(H, 5).mT
    with torch.no_grad(), config(backend="loop" if case == "the loop" else "auto"):
        y = model(**call)

    assert not runs
    runs.off()
    assert torch.equal(y, model(**call))


def test_calls_of_shapes_that_have_passed_are_not_checked_again(monkeypatch):
    model, checked = layer(), []
    check = SwiGLU.check
    monkeypatch.setattr(SwiGLU, "check", lambda self, x: checked.append(1) or check(self, x))
    for tokens in (3, 3, 5, 3):
        model(**arguments(tokens))

    assert len(checked) == 2
