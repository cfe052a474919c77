"""Checks of Dispatch, experts and Combine as one RoutedMLP on our kernels, on a GPU or its emulation.

Against float64, against the steps one by one, and with the same bits however it is called.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fusible import GLU, Activation, Combine, Dispatch, Explanation, GroupedLinear, Scale, Sequential, config
from fusible.ops.kernels.doors import gathered_wgrad, inference

from .routed import CASES, Problem, distance

UNFUSED = {"RoutedMLP", "GroupedMLP", "GroupedLinearGLU", "GLUScale"}


class Layer:
    """The layer of a problem as a container, on the problem's parameters."""

    def __init__(self, device: str, name: str, weights: torch.dtype = torch.float32) -> None:
        self.problem = Problem(device, replace(CASES[name], weights=weights))
        case, (up, down, up_bias, down_bias) = self.problem.case, self.problem.parameters
        self.model = Sequential(
            Dispatch(case.groups),
            linear(up, up_bias, case.transposed),
            gate(case.spec),
            linear(down, down_bias, case.transposed),
            Scale(),
            Combine(),
        )
        p = self.problem
        fc1, fc2 = self.model[1], self.model[3]
        self.leaves = [p.x, p.weights, fc1.weight, fc2.weight]
        self.leaves += [] if up_bias is None else [fc1.bias, fc2.bias]

    def run(self) -> Tensor:
        y: Tensor = self.model(self.problem.x, top_k_index=self.problem.ids, top_k_weights=self.problem.weights)
        return y

    def results(self) -> list[Tensor]:
        y = self.run()
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.problem.dy)]


def gate(spec) -> nn.Module:
    """The op of an activation."""
    if not spec.gated:
        return Activation(spec.name)
    op = GLU(spec.name)
    op.spec = spec
    return op


def linear(weight: Tensor, bias: Tensor | None, transposed: bool) -> GroupedLinear:
    """A grouped linear on the values of parameters."""
    groups, rows, columns = weight.shape
    sizes = (rows, columns) if transposed else (columns, rows)
    op = GroupedLinear(
        groups,
        *sizes,
        bias=bias is not None,
        dtype=weight.dtype,
        device=weight.device,
        transposed_weight=transposed,
    )
    with torch.no_grad():
        op.weight.copy_(weight)
        if bias is not None:
            op.bias.copy_(bias)
    return op


def step_names(explanation: Explanation) -> list[str]:
    return [step.name for step in explanation.steps]


def check_trains(device: str, name: str) -> None:
    """Right against float64."""
    layer = Layer(device, name)
    results, truth = layer.results(), layer.problem.truth()

    assert step_names(layer.model.explain()) == ["RoutedMLP"]
    assert [t.shape for t in results] == [t.shape for t in truth]
    assert all(bool(t.isfinite().all()) for t in results)
    assert max(distance(*pair) for pair in zip(results, truth, strict=True)) < 0.02
    if layer.problem.case.absent:
        lost = layer.problem.lost
        assert not results[1][lost.expand_as(results[1])].any()
        assert not results[2][layer.problem.ids == layer.problem.case.groups].any()


def check_fusion_changes_nothing(device: str, name: str) -> None:
    """Errors of the fused and of the unfused layer are of one size. Tokens of no expert are NaN, and reach nothing."""
    layer = Layer(device, name)
    fused, truth = layer.results(), layer.problem.truth()
    with config(disable_fusions=UNFUSED):
        unfused = layer.results()
        assert len(step_names(layer.model.explain())) == 6
    for a, b, c in zip(fused, unfused, truth, strict=True):
        assert distance(a, c) <= 2 * distance(b, c) + 1e-6


def check_same_bits_again(device: str, name: str) -> None:
    """A second and a third call, which may be replayed, give the bits of the first."""
    layer = Layer(device, name)
    first = layer.results()
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(first, layer.results(), strict=True))


def check_without_gradients(device: str, name: str) -> None:
    """A call that keeps nothing, and may be one launch of all kernels, has the bits of one that trains."""
    layer = Layer(device, name)
    expected = layer.run().detach()
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(layer.run(), expected)


def check_weights_of_any_type(device: str, name: str, dtype: torch.dtype) -> None:
    """Right with weights of ``dtype``, and with gradients of theirs: fused or not, replayed or not, in one call."""
    layer = Layer(device, name, dtype)
    fused, truth = layer.results(), layer.problem.truth()
    with config(disable_fusions=UNFUSED):
        unfused = layer.results()
    repeated = [layer.results() for _ in range(3)]
    with torch.no_grad():
        called = layer.run()

    assert step_names(layer.model.explain()) == ["RoutedMLP"]
    for results in (fused, unfused, *repeated):
        assert results[2].dtype == dtype
        assert max(distance(*pair) for pair in zip(results, truth, strict=True)) < 0.02
    assert distance(called, truth[0]) < 0.02


def check_called_gives_the_bits_of_the_trained(device: str, name: str) -> None:
    layer = Layer(device, name)
    problem, expected = layer.problem, layer.run().detach()
    call = inference.one_call(problem.experts)
    assert call is not None
    with torch.no_grad():
        y = call(problem.x, problem.ids, problem.weights)
        again = call(problem.x, problem.ids.int(), problem.weights)

    assert torch.equal(y, expected)
    assert torch.equal(y, again)


def check_sliced_gradients_are_the_same(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Layer(device, name).results()
    monkeypatch.setattr(gathered_wgrad, "SLICED_FROM", 1)
    monkeypatch.setattr(gathered_wgrad, "_SLICE_UNIT", 8)
    layer = Layer(device, name)
    sliced = layer.results()

    assert len(list(gathered_wgrad._slices(layer.problem.x.shape[1]))) == 4
    assert all(torch.equal(*pair) for pair in zip(whole, sliced, strict=True))


def check_frozen_parts_change_nothing_else(device: str, frozen: int) -> None:
    """Unwanted gradients are None, wanted ones have the same bits; the last case freezes all parameters."""
    layer = Layer(device, "gpt-oss")
    leaves = layer.leaves
    everything = dict(zip(map(id, leaves), layer.results()[1:], strict=True))
    for tensor in leaves[2:] if frozen == 6 else leaves[frozen : frozen + 1]:
        tensor.requires_grad_(False)
    wanted = [tensor for tensor in leaves if tensor.requires_grad]
    grads = torch.autograd.grad(layer.run(), wanted, layer.problem.dy)

    assert all(torch.equal(g, everything[id(t)]) for t, g in zip(wanted, grads, strict=True))


def check_backward_twice(device: str) -> None:
    """With retain_graph nothing is let go of."""
    layer = Layer(device, "biases")
    y = layer.run()
    first = torch.autograd.grad(y, layer.leaves, layer.problem.dy, retain_graph=True)
    second = torch.autograd.grad(y, layer.leaves, layer.problem.dy)

    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, layer.leaves, layer.problem.dy)


def check_tokens_that_changed_are_an_error(device: str) -> None:
    layer = Layer(device, "plain")
    y = layer.run()
    with torch.no_grad():
        layer.problem.x.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, layer.leaves, layer.problem.dy)


def check_profile_names_the_call(device: str) -> None:
    layer = Layer(device, "plain")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, acc_events=True) as profile:
        layer.run()

    assert "fusible::RoutedMLP" in {event.key for event in profile.key_averages()}
