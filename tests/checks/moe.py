"""Checks of Dispatch, experts and Combine as one RoutedMLP on our kernels, on a GPU or its emulation.

Against float64, against the steps one by one, and with the bits of the function that transformers' layers run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusible import GLU, Activation, Combine, Dispatch, Explanation, GroupedLinear, Scale, Sequential, config

from .routed import CASES, Problem, distance

UNFUSED = {"RoutedMLP", "GroupedMLP", "GroupedLinearGLU", "GLUScale"}


class Layer:
    """The layer of a problem as a container, on the problem's parameters."""

    def __init__(self, device: str, name: str) -> None:
        self.problem = Problem(device, CASES[name])
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
    """Right against float64, and near the steps one by one; the forward has the bits of the layer of transformers."""
    layer = Layer(device, name)
    results, truth = layer.results(), layer.problem.truth()

    assert step_names(layer.model.explain()) == ["RoutedMLP"]
    assert [t.shape for t in results] == [t.shape for t in truth]
    assert all(bool(t.isfinite().all()) for t in results)
    assert max(distance(*pair) for pair in zip(results, truth, strict=True)) < 0.02
    assert torch.equal(results[0], layer.problem.run().detach())
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
