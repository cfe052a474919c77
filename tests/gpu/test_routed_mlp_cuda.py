"""Dispatch, experts and Combine as one RoutedMLP on a GPU: right, sync-free, capturable; rows are not kept."""

from __future__ import annotations

import pytest
import torch
from checks.device import needs_hopper
from checks.moe import (
    Layer,
    check_fusion_changes_nothing,
    check_same_bits_again,
    check_trains,
    check_weights_of_any_type,
    check_without_gradients,
)
from checks.routed import CASES

from fusible import config

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]


@pytest.mark.parametrize("name", CASES)
def test_trains(name: str) -> None:
    check_trains("cuda", name)


@pytest.mark.parametrize("name", CASES)
def test_fusion_changes_nothing(name: str) -> None:
    check_fusion_changes_nothing("cuda", name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_routing_weights_of_any_type(name: str, dtype: torch.dtype) -> None:
    check_weights_of_any_type("cuda", name, dtype)


@pytest.mark.parametrize("name", ["plain", "gpt-oss", "absent"])
def test_same_bits_again(name: str) -> None:
    check_same_bits_again("cuda", name)


@pytest.mark.parametrize("name", CASES)
def test_without_gradients(name: str) -> None:
    check_without_gradients("cuda", name)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_another_backend_is_pytorch_everywhere(backend: str) -> None:
    layer = Layer("cuda", "plain")
    expected, truth = layer.results(), layer.problem.truth()
    with config(backend=backend):
        got = layer.results()
        kernels = layer.model.explain().steps[0].kernel

    assert "hopper" not in kernels
    assert "fusible" not in kernels
    for a, b, c in zip(got, expected, truth, strict=True):
        assert float((a.double() - c).norm()) <= 3 * float((b.double() - c).norm()) + 1e-6 * float(c.norm())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_for_nothing_and_can_be_captured() -> None:
    layer = Layer("cuda", "biases")
    problem = layer.problem
    for _ in range(3):
        layer.results()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = layer.results()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.results()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = layer.results()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True))

    with torch.no_grad():
        problem.ids.copy_(problem.ids.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(captured, layer.results(), strict=True))


def test_rows_are_not_kept() -> None:
    layer = Layer("cuda", "plain")
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer.run()
    tokens, features = layer.problem.x.shape

    assert not [t for t in kept if t.shape == (tokens * layer.problem.case.slots, features)]
