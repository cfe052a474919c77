"""Groups of any shapes against float64, one launch at a time; needs an H100 or H200 and the built extension.

What lies behind the last group is NaN in the operands, and so is all around them; of the output it is compared bit by
bit.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from checks.device import skip_module_without_hopper
from checks.ragged import (
    ALIGNED,
    MIXED,
    ODD,
    SHAPES,
    Case,
    Problem,
    Shapes,
    any_shapes,
    check,
    check_autograd_through_the_door,
    check_dims_that_all_groups_share,
    check_dims_that_lie_stay_inside,
    check_equal_shapes_give_the_bits_of_the_grouped_gemm,
    check_nothing,
    check_operands_that_fill_their_memory,
)

from fusible import config, grouped_gemm
from fusible.ops.kernels.hopper import ragged as hopper_ragged
from fusible.ops.kernels.problems.gemm import Layout

pytestmark = pytest.mark.cuda
skip_module_without_hopper()

LAYOUTS = list(Layout)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes(layout: Layout, shapes: Shapes) -> None:
    for dtype, wide in product((torch.bfloat16, torch.float16), (False, True)):
        case = Case(layout, shapes, dtype=dtype, out_dtype=torch.float32 if wide else dtype)
        check("cuda", case)
        check("cuda", case, beta=1.0, fresh=False, index=torch.int32)
        check("cuda", case, shift=1, fresh=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_that_fill_their_memory(layout: Layout) -> None:
    check_operands_that_fill_their_memory("cuda", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors(layout: Layout) -> None:
    for shapes, wide, alpha, beta in product(
        (ALIGNED, ODD), (None, torch.float32), (None, 0.5, "groups"), (0.0, -0.75, "groups")
    ):
        check("cuda", Case(layout, shapes, out_dtype=wide, alpha=alpha, beta=beta))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bias(layout: Layout) -> None:
    for columns, bias in product((264, 37), (torch.float32, torch.bfloat16)):
        shapes = tuple((m, columns, k) for m, _, k in MIXED + ((5, columns, 0),))
        check("cuda", Case(layout, shapes, bias=bias, alpha="groups"))
        check("cuda", Case(layout, shapes, bias=bias, beta=1.0, uniform=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dims_that_all_groups_share(layout: Layout) -> None:
    check_dims_that_all_groups_share("cuda", layout)


@pytest.mark.parametrize("groups", [1, 3, 65, 512])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_shapes(layout: Layout, groups: int) -> None:
    most = (300, 600, 300) if groups < 512 else (60, 60, 40)
    for seed, step in product(range(4), (8, 1)):
        shapes, index = any_shapes(groups, seed, most, step), torch.int32 if seed % 3 else torch.int64
        wide = None if seed else torch.float32
        check("cuda", Case(layout, shapes, fresh=seed % 2 == 0, index=index, out_dtype=wide))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_groups(layout: Layout) -> None:
    """More rows of tiles than a band has, more columns than one, and a deep one."""
    check("cuda", Case(layout, ((2500, 1032, 136), (16, 24, 4096), (1300, 776, 520))))
    check("cuda", Case(layout, ((1290, 515, 71), (16, 24, 4099))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing(layout: Layout) -> None:
    check_nothing("cuda", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dims_that_lie_stay_inside(layout: Layout) -> None:
    check_dims_that_lie_stay_inside("cuda", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeats_are_bitwise_equal(layout: Layout) -> None:
    problem = Problem("cuda", Case(layout, any_shapes(20, 5, (700, 900, 500)), beta=1.0, out_dtype=torch.float32))
    problem.launch()
    first = problem.out.data.clone()
    for _ in range(5):
        problem.out.data.copy_(problem.before)
        problem.launch()
        assert torch.equal(problem.out.data.view(torch.int32), first.view(torch.int32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_shapes_give_the_bits_of_the_grouped_gemm(layout: Layout) -> None:
    check_equal_shapes_give_the_bits_of_the_grouped_gemm("cuda", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autograd_through_the_door(layout: Layout) -> None:
    check_autograd_through_the_door("cuda", layout)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_waits_for_the_device(layout: Layout) -> None:
    problem = Problem("cuda", Case(layout, MIXED))
    a, b = (t.with_data(t.data.clone().requires_grad_()) for t in (problem.a, problem.b))
    size = sum(m * n for m, n, _ in MIXED)
    try:
        torch.cuda.set_sync_debug_mode("error")
        with config(strict=True):
            grouped_gemm(a, b, layout=layout.value, out_elements=size).data.sum().backward()
            with torch.no_grad():
                grouped_gemm(a, b, layout=layout.value, out=problem.out, accumulate=True)
        with pytest.raises(RuntimeError, match="synchroniz"):
            grouped_gemm(a, b, layout=layout.value)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refusals_say_why() -> None:
    gemm = Problem("cuda", Case(Layout.NT, MIXED)).gemm()
    assert hopper_ragged.refusal(gemm) is None
    for changes, words in [
        ({"a": gemm.a.with_data(gemm.a.data.float())}, "needs bfloat16 or float16 operands"),
        ({"out": gemm.out.with_data(gemm.out.data.half())}, "gives torch.bfloat16 or float32, not torch.float16"),
        ({"bias": torch.zeros(7, 8, device="cuda", dtype=torch.float64)}, "a bias of 16 or 32 bits"),
    ]:
        assert words in (hopper_ragged.refusal(replace(gemm, **changes)) or "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_replayed_with_other_shapes(layout: Layout) -> None:
    """The dims are read when the graph runs; addresses and room are those of the capture."""
    series = [any_shapes(9, seed, (200, 300, 150), step) for seed, step in ((1, 8), (2, 1), (3, 8))]
    room = Problem("cuda", Case(layout, ((300, 700, 700),) * 9, tail=0))
    room.launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        room.launch()
    for seed, shapes in enumerate(series):
        problem = Problem("cuda", Case(layout, shapes, tail=0), seed)
        for to, have in ((room.a, problem.a), (room.b, problem.b), (room.out, problem.out)):
            to.first_dims.copy_(have.first_dims), to.last_dims.copy_(have.last_dims)
            to.data[: have.data.numel()] = have.data

        def replay(problem: Problem = problem) -> None:
            graph.replay()
            problem.out.data.copy_(room.out.data[: problem.out.data.numel()])

        problem.check(replay)
