"""The experts inside CUDA graphs: what a graph holds, and that replays give what eager calls give."""

from __future__ import annotations

import re
from functools import partial

import other_backend
import pytest
import torch
from checks.device import needs_hopper
from graph_nodes import captured, kernels, kinds
from models import mlp
from reference import assert_same, unit
from torch import Tensor, nn

from fusible import Sequential

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node", "ignore:The CUDA Graph is empty"),
]

E, K, F, N, T = 5, 64, 128, 72, 512
BF16 = torch.bfloat16
PRODUCT = re.compile("grouped_gemm|^rows_kernel|^weights_kernel")  # a kernel of ours for Hopper, or in Triton
LARGEST_GRAPH = {"triton": 15}.get(other_backend.of_run(), 13)  # Triton's tiles of each product are a kernel of its own
SPLITS = [
    [100, 0, 90, 1, 50],
    [0, 0, 0, 0, 512],
    [51, 51, 51, 51, 52],
    [0, 0, 0, 0, 0],
    [7, 8, 9, 0, 0],
    [129, 0, 255, 1, 63],
]


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return unit(*shape, dtype=dtype, grad=False).cuda().requires_grad_(grad)


def sizes_of(splits: list[int]) -> Tensor:
    return torch.tensor(splits, device="cuda")


experts = partial(mlp, E, K, F, N, bias=False, device="cuda", dtype=BF16)


class Inputs:
    """Tensors that stay where they are while their values change; the first half are what a call is given."""

    def __init__(self) -> None:
        self.x, self.scales = tensor(T, K, grad=True), tensor(T, dtype=torch.float32, grad=True)
        self.sizes, self.dy = sizes_of(SPLITS[0]), tensor(T, N)

    def change(self, splits: list[int]) -> None:
        with torch.no_grad():
            for old in (self.x, self.scales, self.dy):
                old.copy_(tensor(*old.shape, dtype=old.dtype))
                old[sum(splits) :] = torch.nan  # the tail reaches nothing
        self.sizes.copy_(sizes_of(splits))


def valid(tensors: tuple[Tensor, ...], splits: list[int]) -> tuple[Tensor, ...]:
    """Copies, without the tails of rows."""
    return tuple(t.detach()[: sum(splits)].clone() if t.shape[0] == T else t.detach().clone() for t in tensors)


def test_nodes_are_seen() -> None:
    x, y = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")

    graph, _ = captured(lambda: (x.mul_(2), y.copy_(x)))

    assert kinds(graph)["memcpy"] == 1
    assert len(kernels(graph)) == kinds(graph)["kernel"] == 1


@pytest.mark.parametrize("single", [True, False])
def test_a_step_copies_nothing_and_asks_no_host(single: bool) -> None:
    """Not even with buffers of the caller, whose results the kernels write themselves."""
    model, given = experts(single_grouped_weight=single), Inputs()
    out, dx = torch.empty(T, N, device="cuda", dtype=BF16), torch.empty(T, K, device="cuda", dtype=BF16)
    keywords = {
        0: {"split_sizes": given.sizes, "grad_input": dx},
        2: {"scales": given.scales},
        3: {"split_sizes": given.sizes, "output": out},
    }

    def step() -> tuple[Tensor, ...]:
        y = model(given.x, op_kwargs=keywords)
        return torch.autograd.grad(y, [given.x, given.scales, *model.parameters()], given.dy)

    graph, _ = captured(step)

    assert kinds(graph).keys() == {"kernel"}, kinds(graph)
    assert len([name for name in kernels(graph) if PRODUCT.search(name)]) == 6, kernels(graph)
    assert len(kernels(graph)) <= LARGEST_GRAPH, kernels(graph)


def test_main_grad_accumulates_in_every_replay() -> None:
    model, given = experts(accumulate_into_main_grad=True), Inputs()
    for weight in model.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)

    def step() -> Tensor:
        y = model(given.x, split_sizes=given.sizes, scales=given.scales)
        y.backward(given.dy)
        return y

    graph, _ = captured(step)
    eager = experts()
    eager.load_state_dict(model.state_dict())
    expected = [torch.zeros_like(weight, dtype=torch.float32) for weight in eager.parameters()]
    for weight in model.parameters():
        weight.main_grad.zero_()
    for splits in SPLITS:
        given.change(splits)
        graph.replay()
        y = eager(given.x, split_sizes=given.sizes, scales=given.scales)
        for total, gradient in zip(expected, torch.autograd.grad(y, list(eager.parameters()), given.dy), strict=True):
            total += gradient

    for weight, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.main_grad, total, rtol=0.02, atol=0.05)
    assert kinds(graph).keys() == {"kernel"}, kinds(graph)


def test_delayed_weight_gradients_in_a_graph() -> None:
    model, given = experts(delay_wgrad_compute=True), Inputs()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)

    def step() -> tuple[Tensor, ...]:
        for weight in model.parameters():
            weight.grad.zero_()
        y = model(given.x, split_sizes=given.sizes, scales=given.scales)
        (dx,) = torch.autograd.grad(y, [given.x], given.dy)
        for op in (model[0], model[3]):
            op.backward_dw()
        return y, dx, *(weight.grad for weight in model.parameters())

    graph, results = captured(step)
    for splits in SPLITS:
        given.change(splits)
        graph.replay()
        replayed = valid(results, splits)

        assert_same(replayed, valid(step(), splits))


class Layer(nn.Module):
    """The experts, called as :func:`torch.cuda.make_graphed_callables` wants it: by position."""

    def __init__(self, model: Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, scales: Tensor, sizes: Tensor) -> Tensor:
        y: Tensor = self.model(x, split_sizes=sizes, scales=scales)
        return y


def test_graphed_callables() -> None:
    model, given = experts(), Inputs()
    layer = Layer(model)
    samples = (
        given.x.detach().clone().requires_grad_(),
        given.scales.detach().clone().requires_grad_(),
        given.sizes.clone(),
    )
    graphed = torch.cuda.make_graphed_callables(Layer(model), samples)
    for splits in SPLITS:
        given.change(splits)
        results = []
        for call in (graphed, layer):
            y = call(given.x, given.scales, given.sizes)
            leaves = [given.x, given.scales, *model.parameters()]
            results.append(valid((y, *torch.autograd.grad(y, leaves, given.dy)), splits))

        assert_same(*results)
