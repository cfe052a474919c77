"""``routed_experts`` and ``MoE`` on a GPU: right, the bits of a container, sync-free."""

from __future__ import annotations

import pytest
import torch
from checks.device import needs_hopper
from checks.layers import check_function_gives_the_bits_of_the_layer, check_layer_trains
from checks.routed import CASES

from fusible import MoE

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]


@pytest.mark.parametrize("name", CASES)
def test_function_gives_the_bits_of_the_layer(name: str) -> None:
    check_function_gives_the_bits_of_the_layer("cuda", name)


def test_layer_trains() -> None:
    check_layer_trains("cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_of_the_layer_waits_for_nothing() -> None:
    sizes = {"hidden": 64, "ffn": 32, "experts": 8, "top_k": 2, "groups": 4, "top_groups": 2, "shared_ffn": 32}
    layer = MoE(**sizes, balance_loss=0.1, bias_update_rate=0.1, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(33, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> torch.Tensor:
        y, loss, _ = layer(x)
        (y.square().mean() + loss).backward()
        layer.update_bias()
        return y.detach()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(y.isfinite().all())


@pytest.mark.filterwarnings("ignore:[\\s\\S]*Online softmax is disabled")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers_count_each_token_once(mode: str) -> None:
    layer = MoE(64, 32, experts=8, top_k=2, bias_update_rate=0.1, dtype=torch.bfloat16, device="cuda")
    compiled, x = torch.compile(layer, mode=mode), torch.randn(33, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        counts = layer(x).tokens_per_expert
    for step in range(1, 6):
        layer.zero_grad()  # the next replay overwrites gradients that a replay has made
        compiled(x).y.square().mean().backward()
        assert torch.equal(layer.load, step * counts)


def test_a_captured_step_counts_at_each_replay() -> None:
    layer = MoE(64, 32, experts=8, top_k=2, bias_update_rate=0.1, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(33, 64, device="cuda", dtype=torch.bfloat16)
    counts, side, graph = layer(x).tokens_per_expert, torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x).y.square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    layer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        layer(x).y.square().mean().backward()
    layer.load.zero_()
    for _ in range(4):
        graph.replay()

    assert torch.equal(layer.load, 4 * counts)


def test_the_load_goes_where_the_layer_goes() -> None:
    layer = MoE(64, 32, experts=8, top_k=2, bias_update_rate=0.1, dtype=torch.bfloat16)
    layer.load.add_(3)
    layer.cuda()

    assert layer.load.is_cuda
    assert layer.load.tolist() == [3] * 8
