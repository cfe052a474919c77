"""Products that do not need one another overlap on a GPU, and have the bits of those that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import independent as checks
from checks.device import needs_hopper
from models import mlp
from torch import Tensor

from fusible.fuser import replay
from fusible.fuser.replay import capture

pytestmark = [pytest.mark.cuda, needs_hopper]

SHORT = tuple(40 + 37 * i % 90 for i in range(64))  # two rounds of tiles, and tasks of many heights
LONG = (1031, 0, 5, 2048, 700)


@pytest.mark.parametrize(("sizes", "k", "n"), [(SHORT, 512, 776), (LONG, 1160, 1536), ((0, 0, 3), 136, 264)])
@pytest.mark.parametrize("wide", [False, True])
def test_products_have_the_bits_of_launches_that_wait(sizes: tuple[int, ...], k: int, n: int, wide: bool) -> None:
    """Two hundred times each: of products that are called, and that are added to what stood there."""
    checks.check_products("cuda", sizes, k, n, repeats=100, dtype=torch.bfloat16, wide=wide)


def graph_of(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return lambda: (graph.replay(), out)[1]


@pytest.mark.parametrize("captured", [lambda run: run, graph_of], ids=["called", "graph"])
@pytest.mark.parametrize(("sizes", "k", "n"), [(SHORT, 512, 776), (LONG, 1160, 1536)])
def test_what_comes_behind_the_last_sees_what_the_first_wrote(
    captured: Callable[[Any], Any], sizes: tuple[int, ...], k: int, n: int
) -> None:
    checks.check_chains("cuda", sizes, k, n, 200, captured)


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("large", [1, 2**30])
def test_the_backward_of_experts(main_grad: bool, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed with all memory at once, and letting go of it between launches."""
    monkeypatch.setattr(capture, "LARGE", large)
    model = mlp(len(SHORT), 512, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    before = replay.stats().replayed
    checks.check_experts(checks.with_main_grad(model) if main_grad else model, "cuda", SHORT, 512, 60)
    assert replay.stats().replayed - before > 100


def test_the_backward_of_experts_in_a_graph() -> None:
    """The bits equal those of a backward that waits; the forward is in the graph too."""
    model = mlp(len(SHORT), 512, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(sum(SHORT), 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales, sizes, dy = torch.rand(x.shape[0], device="cuda"), torch.tensor(SHORT, device="cuda"), torch.randn_like(x)

    def step() -> list[Tensor]:
        y = model(x, split_sizes=sizes, scales=scales)
        return [*torch.autograd.grad(y, [x, *model.parameters()], dy.detach())]

    with checks.apart():
        want = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(50):
        for gradient in got:
            gradient.fill_(checks.POISON)
        graph.replay()
        checks.assert_same(got, want)
