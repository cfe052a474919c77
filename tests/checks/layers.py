"""Checks of the function ``routed_experts`` and the layer ``MoE`` on our kernels, on a GPU or its emulation."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible import MoE
from fusible.functional import routed_experts

from .moe import Layer, step_names


def of_function(layer: Layer) -> list[Tensor]:
    """The output and all gradients of the function on the parameters of a layer."""
    fc1, act, fc2, problem = *layer.model[1:4], layer.problem
    biases = {"up_bias": fc1.bias, "down_bias": fc2.bias} if fc1.has_bias else {}
    tokens = problem.x, problem.ids, problem.weights
    y = routed_experts(*tokens, fc1.weight, fc2.weight, **biases, activation=act, transposed=problem.case.transposed)
    return [y.detach(), *torch.autograd.grad(y, layer.leaves, problem.dy)]


def check_function_gives_the_bits_of_the_layer(device: str, name: str) -> None:
    """Two layers in turns, whose weights are lent to one container, also if calls may be replayed."""
    layers = [Layer(device, name), Layer(device, name)]
    with torch.no_grad():
        layers[1].model[1].weight.mul_(0.5)
    expected = [layer.results() for layer in layers]

    if expected[0][3].any():  # without rows both are zero
        assert not torch.equal(expected[0][3], expected[1][3])
    for _ in range(4):
        for layer, truth in zip(layers, expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(of_function(layer), truth, strict=True))
    with torch.no_grad():
        fc1, act, fc2, problem = *layers[0].model[1:4], layers[0].problem
        biases = {"up_bias": fc1.bias, "down_bias": fc2.bias} if fc1.has_bias else {}
        for _ in range(3):
            y = routed_experts(
                *(problem.x, problem.ids, problem.weights, fc1.weight, fc2.weight),
                **biases,
                activation=act,
                transposed=problem.case.transposed,
            )
            assert torch.equal(y, expected[0][0])


def check_layer_trains(device: str) -> None:
    """A whole layer in bf16 is near the same in float64 on a CPU, and its steps have the same bits every time."""
    torch.manual_seed(3)
    sizes = {"hidden": 64, "ffn": 32, "experts": 8, "top_k": 2, "scores": "sigmoid", "bias_update_rate": 0.1}
    layer = MoE(**sizes, balance_loss=0.1, shared_ffn=32, dtype=torch.bfloat16, device=device)
    exact = MoE(**sizes, balance_loss=0.1, shared_ffn=32, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(3, 11, 64, device=device).bfloat16().requires_grad_()
    outputs = [_step(layer, x) for _ in range(4)]
    truth = _step(exact, x.detach().cpu().double().requires_grad_())

    assert step_names(layer.experts.explain()) == ["RoutedMLP"]
    names = ["y", "loss", "x", *[name for name, _ in layer.named_parameters()]]
    for call, again in enumerate(outputs[1:], 2):
        pairs = zip(names, again, outputs[0], strict=True)
        assert (call, [name for name, *pair in pairs if not torch.equal(*pair)]) == (call, [])
    for got, right in zip(outputs[0], truth, strict=True):
        assert float((got.cpu().double() - right).norm()) <= 0.03 * float(right.norm())
    layer.update_bias()
    assert layer.router.selection_bias.any()
    assert not layer.load.any()


def _step(layer: MoE, x: Tensor) -> list[Tensor]:
    """The output, the loss, and all gradients."""
    y, loss, _ = layer(x)
    leaves = [x, *layer.parameters()]
    return [y.detach(), loss.detach(), *torch.autograd.grad(y.square().mean() + loss, leaves)]
