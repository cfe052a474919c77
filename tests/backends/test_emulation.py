"""The CUDA sources on the CPU (tests/emulation): the checks that a GPU runs too (tests/checks), on small problems.

What is read where nothing may be read is NaN, what is written where nothing may be written is seen bit by bit, a
barrier that is never reached is a failure, and so is a bulk copy outside of every tensor.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from checks import fused, gemm, layers, lora, moe, ragged, routing, rows
from emulation import build, harness

from fusible.benchmarks import gemm_contestants, grouped_gemm
from fusible.benchmarks.problem import Problem
from fusible.fuser.contract.torch_private import address_function
from fusible.ops import kernels
from fusible.ops.kernels import extension
from fusible.ops.kernels.hopper import epilogue
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.operators.outputs import WantedThrough
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]

RAGGED = (131, 0, 77, 1, 64)
LAYOUTS = list(Layout)
VARIANTS = {Layout.NT: (2, 3, 4, 6, 7, 8, 9), Layout.NN: (2, 3, 4, 6, 7, 8, 9), Layout.TN: (1, 2, 10)}
WIDE = (1, 2)  # of weight gradients in float32
DEEP = 9  # the highest tiles first
SPLIT_K = 10  # a depth that several blocks share
TILES = [(layout, variant) for layout in LAYOUTS for variant in VARIANTS[layout]]
HALVES = [torch.bfloat16, torch.float16]


def check(layout: Layout, sizes: tuple[int, ...] = RAGGED, **asked: Any) -> None:
    gemm.check("cpu", gemm.Case(layout, sizes, **asked))


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_tiles(layout: Layout, variant: int) -> None:
    """Depth and width that no tile divides; odd rows of tiles, more of them than the depth of the queue."""
    check(layout, k=136, n=264, variant=variant)
    check(layout, (300, 0, 129), k=72, n=520, tail=0, variant=variant)


@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
def test_highest_tiles_first(layout: Layout) -> None:
    """Groups of many heights, in more rounds of 32 than one; more of them than are sorted; heights on either side of a
    tile's, and its end within 64 rows."""
    heights = (20, 400, 0, 161, 90, 320, 1, 230, 170, 159)
    check(layout, heights * 4, k=64, n=264, variant=DEEP)
    check(layout, (3, 0, 40) * 90, k=64, n=136, variant=DEEP)
    check(layout, (160, 0, 129, 300), k=136, n=520, tail=0, dtype=torch.float16, variant=DEEP)


@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
@pytest.mark.parametrize("sizes", [(800,), (0, 1060, 3, 28), (333, 0, 330, 1)])
def test_tiles_of_few_long_groups_are_lower(layout: Layout, sizes: tuple[int, ...]) -> None:
    """On four multiprocessors: tiles of 128 rows, of 144, and of 160."""
    check(layout, sizes, k=136, n=200, variant=DEEP)


@pytest.mark.parametrize(
    ("sizes", "k", "n"),
    [((2200,), 328, 136), ((1, 0, 4000, 64), 136, 264), ((0, 90, 4000, 3990), 136, 192), ((1, 0, 1999, 70), 200, 72)],
)
def test_depth_of_long_groups_is_split(sizes: tuple[int, ...], k: int, n: int) -> None:
    """On four multiprocessors: two tiles and one, of two to six row blocks; one long group and two."""
    gemm.check_split("cpu", sizes, k, n, SPLIT_K)


def test_depth_of_few_deep_tiles_is_split_by_choice() -> None:
    """The chosen tile gives the bits of the one that splits; with a bias, the depth is whole."""
    case = gemm.Case(Layout.TN, (5000,), k=136, n=200, dtype=torch.float16)
    chosen, asked, whole = (gemm.Problem("cpu", replace(case, variant=variant)) for variant in (-1, SPLIT_K, 2))
    for problem in (chosen, asked, whole):
        problem.launch()
    assert torch.equal(chosen.out, asked.out)
    assert not torch.equal(chosen.out, whole.out)
    check(Layout.TN, (5000,), k=136, n=72, bias=torch.float32)


def test_depth_of_too_many_groups_is_not_split() -> None:
    check(Layout.TN, (0, 3) * 130 + (2000,), k=72, n=72, variant=SPLIT_K)


@pytest.mark.parametrize("variant", [-1, *VARIANTS[Layout.TN]])
def test_sums_of_16_bits_are_rounded_once(variant: int) -> None:
    """One and two row blocks of a consumer by turns, and output stages in all their slots."""
    gemm.check_one_rounding("cpu", (131, 0, 77, 1, 64), 136, 264, variant)
    gemm.check_one_rounding("cpu", (20, 300, 1), 584, 136, variant)


def test_backward_whose_product_is_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep products of short groups against float64; the gradients of the scales of a tail are zero."""
    rows, depth, hidden, tail = (170, 0, 330), 4096, 24, 3
    generator, tokens = torch.Generator().manual_seed(0), sum(rows)
    dy, weight, preact = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16)
        for shape in ((tokens + tail, depth), (3, depth, hidden), (tokens + tail, 2 * hidden))
    )
    scales = torch.rand(tokens + tail, generator=generator)
    of_preact, of_scales = preact[:tokens].double().requires_grad_(), scales[:tokens].double().requires_grad_()
    gate, up = of_preact.chunk(2, -1)
    postact = torch.nn.functional.silu(gate) * up * of_scales[:, None]
    parts = zip(dy[:tokens].double().split(rows), weight.double(), strict=True)
    postact.backward(torch.cat([part @ matrix for part, matrix in parts]))

    monkeypatch.delattr(epilogue, "backward")
    got = kernels.grouped_linear_activation_backward(
        *(dy, weight, preact, torch.tensor(rows), gated("silu", None, 1.0, 0.0, "concat")),
        scales=scales,
        wanted=WantedThrough(want_scales=True, want_postact=True),
    )

    assert got.scales is not None
    assert not got.scales[tokens:].any()
    for came, should in ((got.preact, of_preact.grad), (got.scales, of_scales.grad), (got.postact, postact.detach())):
        assert came is not None
        assert should is not None
        assert (came[:tokens].double() - should).norm() <= 0.006 * should.norm()


def test_tiles_of_the_benchmark() -> None:
    problem = Problem.make(3, 136, 72, torch.tensor([70, 0, 9]), "cpu", torch.bfloat16)
    for _, p in gemm_contestants.products(problem, main_grad=True):
        tiles = gemm_contestants.tiles(p)
        built = VARIANTS[p.layout] if p.beta is None else WIDE
        assert list(tiles) == [f"tile {variant}" for variant in built]
        assert grouped_gemm.check(p, tiles).keys() == tiles.keys()


@pytest.mark.parametrize("rank", [8, 16, 64, 96])
@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
def test_second_pairs(layout: Layout, rank: int) -> None:
    """The depth of either pair ends within a block of 64, or at its end."""
    for variant in (-1, *extension.library().PAIR_VARIANTS):
        check(layout, k=136, n=264, rank=rank, pitch=24, variant=variant)
        check(layout, (300, 0, 129), k=64, n=520, tail=0, rank=rank, variant=variant)
    check(layout, dtype=torch.float16, rank=rank, separate=True, bias=torch.float32, alpha="groups", row_scale=True)


@pytest.mark.parametrize("name", fused.SOME)
def test_second_pairs_and_epilogues(name: str) -> None:
    check_fused(name, features=72, columns=320, rank=16)
    check_fused(name, features=64, columns=136, rank=96, bias=torch.float32, bias_scale=True)
    check_fused(name, (70, 0, 200), dtype=torch.float16, features=136, columns=136, tail=0, rank=8, transposed=True)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_types(layout: Layout, dtype: torch.dtype, wide: bool, accumulate: bool) -> None:
    out = torch.float32 if wide else dtype
    first, second, *_, last = VARIANTS[layout]
    for variant in (first, second if wide else last):
        check(layout, dtype=dtype, out_dtype=out, accumulate=accumulate, pitch=24, variant=variant)


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_bias_and_factors(layout: Layout, variant: int) -> None:
    scaled = layout is not Layout.TN
    factors = {"alpha": "groups", "row_scale": scaled, "bias_scale": scaled}
    check(layout, bias=torch.float32, variant=variant, **factors)
    check(layout, bias=torch.bfloat16, alpha=0.75, accumulate=True, beta="groups", variant=variant)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_of_either_type(layout: Layout, index: torch.dtype) -> None:
    check(layout, index=index)
    many = tuple(g * 7 % 5 for g in range(70))
    check(layout, many, k=72, n=136, index=index, tail=11)


def test_beta_of_more_groups_than_a_block_has_threads() -> None:
    """The rows before a group are summed by a block of 256 threads."""
    check(Layout.NT, tuple(g % 3 for g in range(300)), k=8, n=8, tail=5, accumulate=True, beta=0.5)


def test_tails_of_more_calls_than_one_clearing_takes(emulation: harness.Emulation) -> None:
    """Calls that are made again together have their tails cleared before the first of them, four by one launch."""
    sizes = range(11)
    a, b = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((12, 8), (1, 8, 8)))
    outs = [torch.empty(12, 8, dtype=torch.bfloat16) for _ in sizes]
    of_groups = [torch.tensor([size]) for size in sizes]
    given = [a, b, *outs, *of_groups]
    with emulation.Capture([(tensor.data_ptr(), tensor.nbytes) for tensor in given], 12) as capture:
        for out, size in zip(outs, of_groups, strict=True):
            hopper.launch(GroupedGemm(Layout.NT, a, b, size, out, fresh=True), dynamic=False)
    for out in outs:
        out.fill_(math.nan)
    capture.launches(capture, 2**20).run(given, [], address_function, 12, 0)
    for out, size in zip(outs, sizes, strict=True):
        assert torch.equal(out, torch.where(torch.arange(12).unsqueeze(1) < size, 8.0, 0.0).expand(12, 8).bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_anywhere(layout: Layout) -> None:
    for variant, wide in product(VARIANTS[layout][:2], (None, torch.float32)):
        check(layout, separate=True, bias=torch.bfloat16, out_dtype=wide, variant=variant)
        check(layout, separate=True, accumulate=True, beta="groups", out_dtype=wide, pitch=24, variant=variant)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_of_one_group(layout: Layout) -> None:
    for size, variant in product((1, 17, 33, 49, 63, 64, 65, 129, 193), VARIANTS[layout][::2]):
        check(layout, (size,), k=72, n=136, tail=size % 5, variant=variant)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_lie(layout: Layout) -> None:
    gemm.check_sizes_that_lie_stay_inside("cpu", layout)


@pytest.mark.parametrize("tail", [0, 50])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing(layout: Layout, tail: int) -> None:
    check(layout, (0, 0, 0), tail=tail)
    check(layout, (0, 0, 0), tail=tail, accumulate=True, out_dtype=torch.float32, pitch=8)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_order_of_threads(emulation: harness.Emulation, layout: Layout, seed: int) -> None:
    """The result of a thread must not depend on the order in which threads run."""
    with emulation.shuffled(seed):
        for variant in VARIANTS[layout]:
            check(layout, n=392, bias=torch.float32, variant=variant)


def test_a_copy_outside_of_every_tensor_is_a_fault(emulation: harness.Emulation) -> None:
    problem, sizes = gemm.Problem("cpu", gemm.Case(Layout.NT, (70,), tail=0)), torch.tensor([70])
    out = torch.zeros(70, 200, dtype=torch.bfloat16)
    fault = r"block \d thread \d+: a bulk store of \d+ bytes at .* outside of every buffer"
    with emulation.without(out), pytest.raises(RuntimeError, match=fault):
        hopper.launch(GroupedGemm(Layout.NT, problem.a, problem.b, sizes, out))


@pytest.mark.parametrize("name", rows.SPECS)
def test_activation(name: str) -> None:
    for dtype, scales in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        rows.check_activation_and_its_backward("cpu", name, dtype, 96, scales)
    rows.check_nan_stays_nan("cpu", name)


@pytest.mark.parametrize("variant", WIDE)
def test_sums_of_long_groups(variant: int) -> None:
    check(Layout.TN, (500, 390), k=136, n=264, out_dtype=torch.float32, accumulate=True, variant=variant)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", [(0, 200, 3, 0), (70, 71, 70, 71)], ids=["halved", "whole"])
def test_tiles_of_few_long_groups_are_halved(sizes: tuple[int, ...], wide: bool) -> None:
    gemm.check_halved("cpu", sizes, 248, 136, wide)


@pytest.mark.parametrize("sizes", [[3, 0, 5], [50, -9, 60], [2**31 - 1] * 3], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_zero_tail(index: torch.dtype, sizes: list[int]) -> None:
    for columns, dtype in ((64, torch.bfloat16), (3, torch.float16)):
        rows.check_zero_tail_writes_the_tail_and_nothing_else("cpu", columns, dtype, sizes, index)


@pytest.mark.parametrize(("columns", "pitch"), [(264, 264), (5, 7)])
@pytest.mark.parametrize("sizes", rows.CHUNKED, ids=str)
def test_sums_and_dots(sizes: list[int], columns: int, pitch: int) -> None:
    rows.check_column_sums("cpu", torch.bfloat16, columns, pitch, sizes, torch.int64, True)
    rows.check_row_dots("cpu", torch.bfloat16, torch.float32, columns, pitch, sizes)


def check_fused(name: str | ActivationSpec, sizes: tuple[int, ...] = RAGGED, **asked: Any) -> None:
    """Every tile that the epilogues are built for; kept or not, and with gradients of everything."""
    case, built = fused.Case(fused.SPECS[name] if isinstance(name, str) else name, sizes, **asked), extension.library()
    fused.check_forward_in_all_tiles("cpu", case)
    for variant in built.BACKWARD_VARIANTS:
        fused.check_backward("cpu", replace(case, variant=variant))


@pytest.mark.parametrize("name", fused.SPECS)
def test_epilogues_of_every_activation(name: str) -> None:
    check_fused(name, features=72, columns=320, bias=torch.float32, bias_scale=True)


@pytest.mark.parametrize("name", fused.SOME)
def test_epilogues_of_types_and_shapes(name: str) -> None:
    check_fused(name, dtype=torch.float16, scales=torch.float16, index=torch.int32)
    check_fused(name, (70, 0, 200), features=8, columns=8, scales=None, tail=0)
    for size in (1, 17, 33, 49, 64, 129):
        check_fused(name, (size,), features=72, columns=136, tail=size % 5)


@pytest.mark.parametrize("name", fused.SOME)
def test_epilogues_with_weights_stored_transposed(name: str) -> None:
    check_fused(name, features=136, columns=320, bias=torch.float32, bias_scale=True, transposed=True)
    check_fused(name, (70, 0, 200), dtype=torch.float16, features=72, columns=136, tail=0, transposed=True)


@pytest.mark.parametrize("want_scales", [False, True])
@pytest.mark.parametrize("want_postact", [False, True])
def test_gradients_that_are_wanted(want_postact: bool, want_scales: bool) -> None:
    case = fused.Case(fused.SPECS["silu glu"], RAGGED)
    for bias in (None, torch.bfloat16, torch.float16) if want_scales else (None,):
        fused.check_backward("cpu", case, want_postact=want_postact, want_scales=want_scales, bias_dtype=bias)


def test_epilogues_of_many_groups() -> None:
    check_fused("silu glu", tuple(g * 7 % 5 for g in range(70)), features=72, columns=136, bias=torch.bfloat16)


def test_epilogues_and_the_edges() -> None:
    check_fused(gated("silu", None, 1.0, 0.0, interleaved(128)), columns=384)  # blocks as wide as half a tile
    fused.check_nothing("cpu")
    fused.check_nan_of_a_group_stays_in_it("cpu")
    fused.check_the_bias_changes_nothing_else("cpu", "gpt-oss")
    fused.check_weights_and_biases_anywhere_in_memory("cpu")


@pytest.mark.parametrize("seed", [1, 2])
def test_epilogues_in_any_order_of_threads(emulation: harness.Emulation, seed: int) -> None:
    with emulation.shuffled(seed):
        for name in fused.SOME:
            check_fused(name)


@pytest.mark.parametrize("kind", ["any", "absent", "one", "few"])
@pytest.mark.parametrize(("tokens", "slots", "experts"), routing.SHAPES)
def test_routing(tokens: int, slots: int, experts: int, kind: str) -> None:
    routing.check_route_sorts_stably("cpu", tokens, slots, experts, kind)
    if tokens < 100 and kind in ("any", "absent"):
        routing.check_rows_go_and_come_back("cpu", tokens, slots, experts, 72, torch.bfloat16, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_to_experts_and_back(dtype: torch.dtype) -> None:
    for columns, slots, kind in ((5, 3, "any"), (8, 8, "absent"), (520, 4, "absent"), (12, 1, "any")):
        routing.check_rows_go_and_come_back("cpu", 13, slots, 6, columns, dtype, kind)
    routing.check_numbers_of_slots("cpu", dtype)
    for weights in (torch.float16, torch.float64):
        routing.check_route_brings_weights_of_any_type("cpu", weights)
    routing.check_rows_with_a_pitch("cpu")
    routing.check_ids_that_lie_stay_inside("cpu")


@pytest.mark.parametrize("seed", [1, 2])
def test_routing_in_any_order_of_threads(emulation: harness.Emulation, seed: int) -> None:
    with emulation.shuffled(seed):
        routing.check_route_sorts_stably("cpu", 1000, 7, 300, "absent")
        routing.check_rows_go_and_come_back("cpu", 13, 4, 6, 72, torch.bfloat16, "absent")


@pytest.mark.parametrize("name", ["plain", "gpt-oss", "biases", "not gated", "absent", "absent, transposed", "nothing"])
def test_routed_layer(name: str) -> None:
    moe.check_called_gives_the_bits_of_the_trained("cpu", name)
    with pytest.MonkeyPatch.context() as patch:
        moe.check_sliced_gradients_are_the_same("cpu", name, patch)


@pytest.mark.parametrize("frozen", range(7))
def test_routed_layer_with_frozen_parts(frozen: int) -> None:
    moe.check_frozen_parts_change_nothing_else("cpu", frozen)


@pytest.mark.parametrize("name", ["plain", "gpt-oss", "biases", "not gated", "absent, transposed", "nothing"])
def test_dispatch_to_combine(name: str) -> None:
    moe.check_trains("cpu", name)
    moe.check_fusion_changes_nothing("cpu", name)
    moe.check_same_bits_again("cpu", name)
    moe.check_without_gradients("cpu", name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_routing_weights_of_any_type(dtype: torch.dtype) -> None:
    for name in ("biases", "absent, transposed"):
        moe.check_weights_of_any_type("cpu", name, dtype)
    lora.check_trains("cpu", (8, 16), strict=False, weights_dtype=dtype)


def test_experts_as_a_function() -> None:
    layers.check_function_gives_the_bits_of_the_layer("cpu", "gpt-oss")


def test_routed_layer_and_autograd() -> None:
    moe.check_backward_twice("cpu")
    moe.check_tokens_that_changed_are_an_error("cpu")
    moe.check_profile_names_the_call("cpu")


@pytest.mark.parametrize("shapes", ragged.SHAPES.values(), ids=ragged.SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_any_shapes(layout: Layout, shapes: ragged.Shapes) -> None:
    for dtype, wide in product(HALVES, (None, torch.float32)):
        ragged.check("cpu", ragged.Case(layout, shapes, dtype=dtype, out_dtype=wide, fresh=wide is None))
    ragged.check("cpu", ragged.Case(layout, shapes, shift=1, beta=1.0, index=torch.int32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_any_shapes_with_factors(layout: Layout) -> None:
    for groups, wide in ((ragged.ALIGNED, None), (ragged.ODD, torch.float32)):
        ragged.check("cpu", ragged.Case(layout, groups, out_dtype=wide, alpha="groups", beta="groups"))
        ragged.check("cpu", ragged.Case(layout, groups, out_dtype=wide, alpha=0.5, beta=0.0))
    ragged.check("cpu", ragged.Case(layout, ((40, 37, 24), (3, 37, 0)), bias=torch.bfloat16, beta=1.0, uniform=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_groups_of_any_shapes(layout: Layout) -> None:
    counts = [(1, 1), (65, 8), (512, 1)]
    for count, step in counts if layout is Layout.NN else counts[:2]:  # the GPU's tests take the most in each
        most = (20, 24, 16) if count > 1 else (300, 600, 90)
        ragged.check("cpu", ragged.Case(layout, ragged.any_shapes(count, 2, most, step), fresh=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edges_of_any_shapes(layout: Layout) -> None:
    ragged.check_nothing("cpu", layout)
    ragged.check_operands_that_fill_their_memory("cpu", layout)
    ragged.check_dims_that_lie_stay_inside("cpu", layout)
    ragged.check_dims_that_all_groups_share("cpu", layout)
    ragged.check_equal_shapes_give_the_bits_of_the_grouped_gemm("cpu", layout)
    ragged.check_autograd_through_the_door("cpu", layout)
    ragged.check("cpu", ragged.Case(layout, ((1290, 515, 71), (16, 24, 600))))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_any_shapes_in_any_order_of_threads(emulation: harness.Emulation, layout: Layout, seed: int) -> None:
    with emulation.shuffled(seed):
        for groups in (ragged.ALIGNED, ragged.MIXED):
            ragged.check("cpu", ragged.Case(layout, groups))


@pytest.mark.parametrize("ranks", [(8, 16), (8, 0), (0, 8), (8, 96)])
def test_low_rank_adapters(ranks: tuple[int, int]) -> None:
    lora.check_trains("cpu", ranks)
