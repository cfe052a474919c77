"""Our Triton kernels against float64 with the tiles of this GPU, whichever it is; what they share with the interpreter
is in ``tests/checks``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import fused, gemm, routing
from checks.functions import ACTS_OF_COLUMNS, ACTS_OF_MATRICES, PUBLISHED, op_of
from triton_interpreter import needs_triton

from fusible import GroupedLinear, Scale, Sequential, SwiGLU, config
from fusible.fuser import replay
from fusible.ops import kernels
from fusible.ops.kernels import extension
from fusible.ops.kernels.doors import routing as door
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.kernels.triton import gemm as triton
from fusible.ops.kernels.triton import row_kernels

pytestmark = [pytest.mark.cuda, needs_triton]

needs_extension = pytest.mark.skipif(not extension.is_built(), reason="calls are replayed by the extension")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (131, 0, 77, 304, 1, 512)
FEW = (3, 0, 1, 16, 7, 30, 60)
LAYOUTS, DTYPES = list(Layout), (BF16, F16, F32)
GEMM = gemm.Case(Layout.NT, RAGGED, backend=triton.NAME)
FUSED: dict[str, Any] = {"sizes": RAGGED, "backend": triton.NAME}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(layout: Layout, dtype: torch.dtype) -> None:
    for sizes in (RAGGED, FEW, (5000, 1200)):
        for k, n in ((8, 136), (264, 520), (768, 320)):
            check(layout=layout, dtype=dtype, sizes=sizes, k=k, n=n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_features(layout: Layout, dtype: torch.dtype) -> None:
    for k, n in ((1407, 33), (33, 1407), (1, 1)):
        check(layout=layout, dtype=dtype, k=k, n=n)


@pytest.mark.parametrize("accumulate", [{"beta": 1.0}, {"beta": "groups"}, {"beta": 0.5, "out_dtype": F32}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_into_what_stands_there(layout: Layout, accumulate: dict[str, Any]) -> None:
    for pitch in (0, 8):
        check(layout=layout, accumulate=True, pitch=pitch, **accumulate)


@pytest.mark.parametrize("factors", [{"alpha": 0.5}, {"alpha": "groups", "bias": BF16}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors(layout: Layout, factors: dict[str, Any]) -> None:
    of_rows = {} if layout is Layout.TN else {"row_scale": True, "bias_scale": "bias" in factors}
    check(layout=layout, index=torch.int64, **factors, **of_rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_anywhere_in_memory(layout: Layout) -> None:
    for sizes in (RAGGED, tuple([i % 3 for i in range(600)])):
        check(layout=layout, sizes=sizes, separate=True, bias=BF16, accumulate=layout is Layout.TN)


@pytest.mark.parametrize("groups", [1, 160, 896, 4096])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_groups(layout: Layout, groups: int) -> None:
    check(layout=layout, sizes=tuple([(i * 2654435761 >> 7) % 6 for i in range(groups)]), k=104, n=160)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_lie_stay_inside(layout: Layout) -> None:
    case = replace(GEMM, layout=layout, sizes=(0, 150, 250, 0), tail=0)
    problem = gemm.Problem("cuda", case)
    problem.sizes = torch.tensor([-5, 150, 1 << 30, 77], dtype=torch.int32, device="cuda")
    problem.check()
    with pytest.raises(RuntimeError, match="the size of group 0 is -5, which is negative"):
        kernels.raise_wrong_sizes(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", fused.SPECS)
def test_activations_in_the_epilogue(name: str, dtype: torch.dtype) -> None:
    case = fused.Case(fused.SPECS[name], dtype=dtype, **FUSED)
    fused.check_forward("cuda", replace(case, bias=F32, bias_scale=True))
    fused.check_backward("cuda", case)


@pytest.mark.parametrize("sizes", [FEW, (2000, 900)])
@pytest.mark.parametrize("name", fused.SOME)
def test_epilogues_of_other_tiles(name: str, sizes: tuple[int, ...]) -> None:
    case = fused.Case(fused.SPECS[name], sizes, transposed=True, scales=BF16, columns=320, backend=triton.NAME)
    fused.check_forward("cuda", case)
    fused.check_backward("cuda", case, bias_dtype=BF16)


@pytest.mark.parametrize("name", PUBLISHED)
def test_functions_of_users(name: str) -> None:
    function, count = PUBLISHED[name]
    case = fused.case_of(op_of(function, count), function, **FUSED)
    fused.check_forward("cuda", case)
    fused.check_backward("cuda", case)


@pytest.mark.parametrize("name", ACTS_OF_COLUMNS)
def test_numbers_of_columns(name: str) -> None:
    make, function = ACTS_OF_COLUMNS[name]
    case = fused.case_of(make("concat"), function, **FUSED)
    fused.check_forward("cuda", case)
    fused.check_backward("cuda", case)


@pytest.mark.parametrize("name", ACTS_OF_MATRICES)
def test_numbers_of_elements(name: str) -> None:
    make, function = ACTS_OF_MATRICES[name]
    fused.check_forward("cuda", fused.case_of(make("concat"), function, **FUSED))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_passes_over_rows(dtype: torch.dtype) -> None:
    valid, sizes = sum(RAGGED), torch.tensor(RAGGED, device="cuda")
    rows = torch.randn(valid + 37, 1407, device="cuda").to(dtype)
    vectors = torch.randn(len(RAGGED), 1407, device="cuda").to(dtype)
    sums, dots = torch.empty(len(RAGGED), 1407, device="cuda"), torch.empty(len(rows), device="cuda")
    rows[valid:] = torch.nan
    row_kernels.column_sums(rows, sizes, sums, None)
    row_kernels.row_dots(rows, vectors, sizes, dots)

    parts = rows[:valid].double().split(list(RAGGED))
    exact = (rows[:valid].double() * vectors.double().repeat_interleave(sizes, 0)).sum(1)
    torch.testing.assert_close(sums.double(), torch.stack([part.sum(0) for part in parts]), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dots[:valid].double(), exact, rtol=1e-5, atol=1e-4)
    assert dots[valid:].eq(0).all()
    row_kernels.zero_tail(rows, sizes)
    assert rows[valid:].eq(0).all()
    assert rows[:valid].isfinite().all()


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_replays_with_other_sizes(dtype: torch.dtype, stacked: bool) -> None:
    """Forward and backward of experts; per-expert weights are at addresses that the graph has captured."""
    form: dict[str, Any] = {"device": "cuda", "dtype": dtype, "single_grouped_weight": stacked}
    model = Sequential(GroupedLinear(3, 104, 320, **form), SwiGLU(), Scale(), GroupedLinear(3, 160, 104, **form))
    sizes = torch.tensor([100, 0, 57], device="cuda")
    x = torch.randn(177, 104, device="cuda", dtype=dtype).requires_grad_()
    scales, dy = torch.rand(177, device="cuda").requires_grad_(), torch.randn(177, 104, device="cuda", dtype=dtype)
    leaves = [x, scales, *model.parameters()]

    def step() -> list[torch.Tensor]:
        y = model(x, split_sizes=sizes, scales=scales)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    with config(backend=triton.NAME):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for other in ([3, 170, 1], [0, 0, 0], [59, 59, 59]):
            sizes.copy_(torch.tensor(other))
            graph.replay()
            for got, expected in zip(captured, step(), strict=True):
                assert torch.equal(got, expected)


@needs_extension
@pytest.mark.parametrize("rows", [64, 700, 3000])
@pytest.mark.parametrize("how", [{}, {"bias": True}, {"single_grouped_weight": False}], ids=["", "bias", "separate"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_repeated_calls_have_the_bits_of_the_first(dtype: torch.dtype, how: dict[str, Any], rows: int) -> None:
    """Their launches are made by the extension, on other tensors and sizes."""
    form: dict[str, Any] = {"device": "cuda", "dtype": dtype, **how}
    model = Sequential(GroupedLinear(3, 104, 320, **form), SwiGLU(), Scale(), GroupedLinear(3, 160, 104, **form))
    calls = []
    for part in (3, 2, 7):
        x, dy = (torch.randn(rows, 104, device="cuda", dtype=dtype) for _ in range(2))
        sizes = torch.tensor([rows // part, 0, rows // 2 - 5], device="cuda")
        calls.append((x.requires_grad_(), torch.rand(rows, device="cuda").requires_grad_(), sizes, dy))

    def step(x: torch.Tensor, scales: torch.Tensor, sizes: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        y = model(x, split_sizes=sizes, scales=scales)
        return [y.detach(), *torch.autograd.grad(y, [x, scales, *model.parameters()], dy)]

    with config(backend=triton.NAME):
        first = [step(*call) for call in calls[:2]]
        before = replay.stats()
        again = [step(*call) for call in calls]
        after = replay.stats()
        repeated, reasons = after.replayed - before.replayed, after.unsupported - before.unsupported
        assert repeated == 6, reasons
        with config(debug=True):  # another form, of which this is the first call
            first.append(step(*calls[2]))
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_extension
def test_repeated_calls_report_wrong_sizes() -> None:
    linear = GroupedLinear(3, 104, 320, device="cuda", dtype=BF16)
    x, sizes = torch.randn(177, 104, device="cuda", dtype=BF16), torch.tensor([100, 0, 57], device="cuda")
    model = Sequential(linear, SwiGLU())
    with config(backend=triton.NAME):
        for _ in range(3):
            model(x, split_sizes=sizes)
        before = replay.stats().replayed
        model(x, split_sizes=torch.tensor([100, 0, 78], device="cuda"))
        repeated = replay.stats().replayed - before
    assert repeated == 1
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="the size of group 2 is 78, more than the rows"):
        kernels.raise_wrong_sizes(0)


def test_nothing_waits_for_the_host() -> None:
    """What a loop over groups cannot: float32 and odd features, without a synchronisation."""
    model = Sequential(GroupedLinear(3, 33, 66, device="cuda"), SwiGLU(), GroupedLinear(3, 33, 17, device="cuda"))
    x, sizes = torch.randn(40, 33, device="cuda", requires_grad=True), torch.tensor([20, 0, 15], device="cuda")

    def step() -> None:
        with config(backend=triton.NAME):
            model(x, split_sizes=sizes).sum().backward()

    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["any", "absent", "one", "few"])
def test_tokens_go_to_experts_and_come_back(kind: str) -> None:
    with config(backend=triton.NAME):
        for tokens, slots, experts in routing.SHAPES:
            routing.check_route_sorts_stably("cuda", tokens, slots, experts, kind)
            for dtype, columns in ((BF16, 1032), (F16, 8), (F32, 33)):
                routing.check_rows_go_and_come_back("cuda", tokens, slots, experts, columns, dtype, kind)


def test_slots_and_ids_of_any_kind() -> None:
    with config(backend=triton.NAME):
        routing.check_ids_that_lie_stay_inside("cuda")
        routing.check_rows_with_a_pitch("cuda")
        for dtype in DTYPES:
            routing.check_numbers_of_slots("cuda", dtype)
            routing.check_route_brings_weights_of_any_type("cuda", dtype)


def test_a_graph_routes_other_ids() -> None:
    ids, x = routing.draw("cuda", 700, 8, 64), routing.numbers("cuda", 700, 33)

    def run() -> torch.Tensor:
        found = door.route(ids, 64, F32)
        return door.unpermute(door.permute(x, found), found)

    with config(backend=triton.NAME):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        for kind in ("absent", "one", "few"):
            ids.copy_(routing.draw("cuda", 700, 8, 64, kind))
            graph.replay()
            assert torch.equal(y, run())


def check(**changes: Any) -> None:
    gemm.Problem("cuda", replace(GEMM, **changes)).check()
