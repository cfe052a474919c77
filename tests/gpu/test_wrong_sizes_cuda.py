"""Kernels report split sizes that do not fit, on a GPU, in graphs and replays as well. Run with ``-m cuda``."""

from __future__ import annotations

import models
import pytest
import torch
from checks import wrong_sizes
from checks.device import needs_hopper
from checks.wrong_sizes import CASES, raised
from graph_nodes import captured

import fusible
from fusible import GroupedLinear
from fusible.fuser import replay
from fusible.ops.kernels.problems.gemm import Layout

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]

E, K, F, N, T = 4, 64, 128, 72, 64
FITS, WRONG = [16, 16, 16, 9], [16, 50, 16, 9]
SECOND = (1, 50, wrong_sizes.TOO_MANY)


def rows() -> torch.Tensor:
    return torch.randn(T, K, device="cuda", dtype=torch.bfloat16)


def linear() -> GroupedLinear:
    return GroupedLinear(E, K, N, device="cuda", dtype=torch.bfloat16)


def sizes_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, device="cuda")


@pytest.mark.parametrize(("sizes", "group", "size", "why"), CASES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", list(Layout))
def test_what_is_reported(
    layout: Layout, index: torch.dtype, sizes: list[int], group: int, size: int, why: str
) -> None:
    wrong_sizes.check_report("cuda", layout, index, sizes, group, size, why)


@pytest.mark.parametrize("layout", list(Layout))
def test_sizes_that_fit_report_nothing(layout: Layout) -> None:
    wrong_sizes.check_sizes_that_fit_report_nothing("cuda", layout)


def test_single_launches() -> None:
    wrong_sizes.check_the_next_launch_raises("cuda")
    wrong_sizes.check_a_report_is_raised_once("cuda")
    wrong_sizes.check_a_huge_size("cuda")


@pytest.mark.parametrize(("sizes", "group", "size", "why"), CASES)
def test_zeroed_tails(sizes: list[int], group: int, size: int, why: str) -> None:
    wrong_sizes.check_zeroed_tails("cuda", sizes, group, size, why)


@pytest.mark.parametrize(("dims", "message"), wrong_sizes.DIMS)
def test_dims(dims: list[int], message: str) -> None:
    wrong_sizes.check_dims("cuda", dims, message)


def test_the_next_call_of_an_op_raises() -> None:
    op, other, x = linear(), linear(), rows()
    op(x, split_sizes=sizes_of(WRONG))
    torch.cuda.synchronize()
    with raised(*SECOND):
        other(x, split_sizes=sizes_of(FITS))
    other(x, split_sizes=sizes_of(FITS))
    torch.cuda.synchronize()
    fusible.check_device_errors()


def test_a_replayed_call_reports_and_raises() -> None:
    """Its launches are made by the extension, without Python between them."""
    model, x = models.mlp(E, K, F, N, device="cuda", dtype=torch.bfloat16), rows()
    scales = torch.rand(T, device="cuda")
    for _ in range(4):
        model(x, split_sizes=sizes_of(FITS), scales=scales)
    before = replay.stats().replayed
    model(x, split_sizes=sizes_of(WRONG), scales=scales)
    assert replay.stats().replayed > before
    torch.cuda.synchronize()
    with raised(*SECOND):
        model(x, split_sizes=sizes_of(FITS), scales=scales)


def test_a_graph_reports_in_every_replay() -> None:
    op, x, sizes = linear(), rows(), sizes_of(FITS)
    graph, _ = captured(lambda: op(x, split_sizes=sizes))
    for _ in range(2):
        sizes.copy_(sizes_of(WRONG))
        graph.replay()
        torch.cuda.synchronize()
        with raised(*SECOND):
            fusible.check_device_errors("cuda")
        sizes.copy_(sizes_of(FITS))
        graph.replay()
        torch.cuda.synchronize()
        fusible.check_device_errors()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    op, x, sizes = linear(), rows(), sizes_of(FITS)
    op(x, split_sizes=sizes)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(x, split_sizes=sizes)
        fusible.check_device_errors(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_grouped_mm_reports_and_raises() -> None:
    """As on a GPU that has none of our kernels."""
    op, x = linear(), rows()
    with fusible.config(backend="grouped_mm"):
        op(x, split_sizes=sizes_of(WRONG))
        torch.cuda.synchronize()
        with raised(*SECOND):
            op(x, split_sizes=sizes_of(FITS))
        op(x, split_sizes=sizes_of(WRONG))
        torch.cuda.synchronize()
        with raised(*SECOND):
            fusible.check_device_errors()
        op(x, split_sizes=sizes_of(FITS))
    torch.cuda.synchronize()
    fusible.check_device_errors()
