"""Passes of low rank over rows on a GPU, and routed experts with adapters that run them."""

from __future__ import annotations

import pytest
import torch
from checks import low_rank
from checks.device import needs_hopper
from checks.low_rank import Case, cases

from fusible.ops.kernels.hopper import low_rank as kernel
from fusible.ops.kernels.problems.gemm import Layout

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]

RAGGED = (131, 0, 77, 304, 1, 512, 700, 64)
SKEWED = (5000, 0, 1, 17, 2600, *range(40))


@pytest.mark.parametrize("sizes", [RAGGED, SKEWED, (0, 0, 0), (1,), tuple(g * 7 % 33 for g in range(512))], ids=len)
@pytest.mark.parametrize(("rank", "columns"), [(16, 2048), (8, 1536), (16, 768), (24, 1032), (64, 776), (16, 5760)])
def test_what_is_wanted(sizes: tuple[int, ...], rank: int, columns: int) -> None:
    for case in cases(sizes=sizes, rank=rank, columns=columns):
        low_rank.check("cuda", case)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"gradient_dtype": torch.float32},
        {"dtype": torch.float16, "gradient_dtype": torch.float32, "rank": 32},
        {"pitch": 24, "index": torch.int64},
        {"tail": 0},
    ],
    ids=str,
)
def test_types_and_strides(options: dict[str, object]) -> None:
    for case in cases(sizes=RAGGED, **options):
        low_rank.check("cuda", case)


def test_twice_is_bitwise_the_same() -> None:
    for case in cases(sizes=SKEWED, columns=2048):
        low_rank.check_same_bits("cuda", case)


def test_graph_replays_with_other_sizes() -> None:
    first, other = (Case(Layout.NN, sizes, 520, top_k=2) for sizes in ((300, 0, 77, 512), (5, 700, 184, 0)))
    p, of_other = low_rank.problem("cuda", first), low_rank.problem("cuda", other)
    kernel.run(p)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(p)
    for mine, theirs in [
        (p.x, of_other.x),
        (p.split_sizes, of_other.split_sizes),
        (p.slot_of_row, of_other.slot_of_row),
        (p.factor, of_other.factor),
        (p.low, of_other.low),
    ]:
        assert mine is not None
        assert theirs is not None
        mine.copy_(theirs)
    graph.replay()
    kernel.run(of_other)
    for mine, theirs in zip(p.out, of_other.out, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
