"""The CUDA sources on the CPU (tests/emulation): the checks of the GPU's tests, on small problems.

What is read where nothing may be read is NaN, what is written where nothing may be written is seen bit by bit, a
barrier that is never reached is a failure, and so is a bulk copy outside of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from emulation import build, harness

from fusible.benchmarks import gemm_contestants, grouped_gemm
from fusible.benchmarks.problem import Problem
from fusible.ops.activation_spec import ActivationSpec, gated, interleaved
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.problem import Layout

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")

RAGGED = (131, 0, 77, 1, 64)
LAYOUTS = list(Layout)
VARIANTS = {Layout.NT: (2, 3, 4, 6, 7), Layout.NN: (2, 3, 4, 6, 7), Layout.TN: (1, 2, 4)}
TILES = [(layout, variant) for layout in LAYOUTS for variant in VARIANTS[layout]]
HALVES = [torch.bfloat16, torch.float16]


class Gpu(NamedTuple):
    """The emulated extension, and the test modules of the GPU on top of it."""

    emulation: harness.Emulation
    gemm: ModuleType
    rows: ModuleType
    fused: ModuleType
    routing: ModuleType
    routed: ModuleType
    ragged: ModuleType


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    emulation = harness.Emulation(build.build())
    with harness.installed(emulation):
        names = "test_kernels_cuda", "test_rows_cuda", "test_fused_kernels_cuda"
        names = *names, "test_routing_cuda", "test_routed_cuda", "test_ragged_cuda"
        yield Gpu(emulation, *map(harness.on_cpu, names))


def check(gpu: Gpu, layout: Layout, sizes: tuple[int, ...] = RAGGED, **what: Any) -> None:
    """With tasks on demand and in a fixed order; compares everything with float64."""
    gpu.gemm.check(gpu.gemm.Case(layout, sizes, **what))


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_tiles(gpu: Gpu, layout: Layout, variant: int) -> None:
    """Depth and width that no tile divides; odd rows of tiles, more of them than the depth of the queue."""
    check(gpu, layout, k=136, n=264, variant=variant)
    check(gpu, layout, (300, 0, 129), k=72, n=520, tail=0, variant=variant)


def test_tiles_of_the_benchmark(gpu: Gpu) -> None:
    problem = Problem.make(3, 136, 72, torch.tensor([70, 0, 9]), "cpu", torch.bfloat16)
    for _, p in gemm_contestants.products(problem, main_grad=True):
        tiles = gemm_contestants.tiles(p)
        assert list(tiles) == [f"tile {variant}" for variant in VARIANTS[p.layout]]
        assert grouped_gemm.check(p, tiles).keys() == tiles.keys()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_types(gpu: Gpu, layout: Layout, dtype: torch.dtype, wide: bool, accumulate: bool) -> None:
    out = torch.float32 if wide else dtype
    first, second, *_, last = VARIANTS[layout]
    for variant in (first, second if wide else last):
        check(gpu, layout, dtype=dtype, out_dtype=out, accumulate=accumulate, pitch=24, variant=variant)


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_bias_and_factors(gpu: Gpu, layout: Layout, variant: int) -> None:
    scaled = layout is not Layout.TN
    factors = {"alpha": "groups", "row_scale": scaled, "bias_scale": scaled}
    check(gpu, layout, bias=torch.float32, variant=variant, **factors)
    check(gpu, layout, bias=torch.bfloat16, alpha=0.75, accumulate=True, beta="groups", variant=variant)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_of_either_type(gpu: Gpu, layout: Layout, index: torch.dtype) -> None:
    check(gpu, layout, index=index)
    many = tuple(g * 7 % 5 for g in range(70))
    check(gpu, layout, many, k=72, n=136, index=index, tail=11)


def test_beta_of_more_groups_than_a_block_has_threads(gpu: Gpu) -> None:
    """The rows before a group are summed by a block of 256 threads."""
    check(gpu, Layout.NT, tuple(g % 3 for g in range(300)), k=8, n=8, tail=5, accumulate=True, beta=0.5)


def test_tails_of_more_calls_than_one_clearing_takes(gpu: Gpu) -> None:
    """Calls that are made again together have their tails cleared before the first of them, four by one launch."""
    launches, sizes = gpu.emulation.Launches(), range(11)
    kept = SimpleNamespace(grouped_gemm=lambda *arguments: launches.grouped_gemm([], *arguments))
    a, b = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((12, 8), (1, 8, 8)))
    outs = [torch.full((12, 8), math.nan, dtype=torch.bfloat16) for _ in sizes]
    of_groups = [torch.tensor([size]) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "compiled", lambda: kept)
        for out, size in zip(outs, of_groups, strict=True):
            hopper.launch(Layout.NT, a, b, out, size, dynamic=False, fresh=True)
    launches.run([], 0, 0)
    for out, size in zip(outs, sizes, strict=True):
        assert torch.equal(out, torch.where(torch.arange(12).unsqueeze(1) < size, 8.0, 0.0).expand(12, 8).bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_anywhere(gpu: Gpu, layout: Layout) -> None:
    for variant, wide in product((VARIANTS[layout][0], 4), (None, torch.float32)):
        check(gpu, layout, separate=True, bias=torch.bfloat16, out_dtype=wide, variant=variant)
        check(gpu, layout, separate=True, accumulate=True, beta="groups", out_dtype=wide, pitch=24, variant=variant)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_of_one_group(gpu: Gpu, layout: Layout) -> None:
    for size, variant in product((1, 17, 33, 49, 63, 64, 65, 129, 193), VARIANTS[layout][::2]):
        check(gpu, layout, (size,), k=72, n=136, tail=size % 5, variant=variant)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_lie(gpu: Gpu, layout: Layout) -> None:
    gpu.gemm.test_sizes_that_lie_stay_inside(layout)


@pytest.mark.parametrize("tail", [0, 50])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing(gpu: Gpu, layout: Layout, tail: int) -> None:
    check(gpu, layout, (0, 0, 0), tail=tail)
    check(gpu, layout, (0, 0, 0), tail=tail, accumulate=True, out_dtype=torch.float32, pitch=8)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_order_of_threads(gpu: Gpu, layout: Layout, seed: int) -> None:
    """What a thread does must not depend on who runs before it."""
    with gpu.emulation.shuffled(seed):
        for variant in VARIANTS[layout]:
            check(gpu, layout, n=392, bias=torch.float32, variant=variant)


def test_a_copy_outside_of_every_tensor_is_a_fault(gpu: Gpu) -> None:
    problem, sizes = gpu.gemm.Problem(gpu.gemm.Case(Layout.NT, (70,), tail=0)), torch.tensor([70])
    out = torch.zeros(70, 200, dtype=torch.bfloat16)
    fault = r"block \d thread \d+: a bulk store of \d+ bytes at .* outside of every buffer"
    with gpu.emulation.without(out), pytest.raises(RuntimeError, match=fault):
        hopper.launch(Layout.NT, problem.a, problem.b, out, sizes)


ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid"]
GATED = [f"{name} glu" for name in ACTIVATIONS] + ["gpt-oss", "blocks of 32", "blocks of 4"]


@pytest.mark.parametrize("name", ACTIVATIONS + GATED)
def test_activation(gpu: Gpu, name: str) -> None:
    for dtype, scales in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        gpu.rows.test_activation_and_its_backward(name, dtype, 96, scales)
    gpu.rows.test_nan_stays_nan(name)


@pytest.mark.parametrize("variant", VARIANTS[Layout.TN])
def test_sums_of_long_groups(gpu: Gpu, variant: int) -> None:
    check(gpu, Layout.TN, (500, 390), k=136, n=264, out_dtype=torch.float32, accumulate=True, variant=variant)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", [(0, 200, 3, 0), (70, 71, 70, 71)], ids=["halved", "whole"])
def test_tiles_of_few_long_groups_are_halved(gpu: Gpu, sizes: tuple[int, ...], wide: bool) -> None:
    gpu.gemm.check_halved(sizes, 248, 136, wide)


@pytest.mark.parametrize("sizes", [[3, 0, 5], [50, -9, 60], [2**31 - 1] * 3], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_zero_tail(gpu: Gpu, index: torch.dtype, sizes: list[int]) -> None:
    for columns, dtype in ((64, torch.bfloat16), (3, torch.float16)):
        gpu.rows.test_zero_tail_writes_the_tail_and_nothing_else(columns, dtype, sizes, index)


@pytest.mark.parametrize(("columns", "pitch"), [(264, 264), (5, 7)])
@pytest.mark.parametrize("number", range(4))
def test_sums_and_dots(gpu: Gpu, number: int, columns: int, pitch: int) -> None:
    sizes = gpu.rows.CHUNKED[number]
    gpu.rows.test_column_sums(torch.bfloat16, columns, pitch, sizes, torch.int64, True)
    gpu.rows.test_row_dots(torch.bfloat16, torch.float32, columns, pitch, sizes)


EVERY = [*ACTIVATIONS, *GATED[:7], "clamped", "gpt-oss", *(f"blocks of {n}" for n in (1, 2, 4, 8, 32, 64))]
SOME = ("silu glu", "gpt-oss", "blocks of 8", "relu2")


def check_fused(gpu: Gpu, name: str | ActivationSpec, sizes: tuple[int, ...] = RAGGED, **what: Any) -> None:
    """Every tile that the epilogues are built for; kept or not, and with gradients of everything."""
    case = gpu.fused.Case(gpu.fused.SPECS[name] if isinstance(name, str) else name, sizes, **what)
    for variant in gpu.fused._C.ACTIVATION_VARIANTS:
        if gpu.fused.fits(case.spec, variant):
            gpu.fused.check_forward(replace(case, variant=variant))
    for variant in gpu.fused._C.BACKWARD_VARIANTS:
        gpu.fused.check_backward(replace(case, variant=variant))


@pytest.mark.parametrize("name", EVERY)
def test_epilogues_of_every_activation(gpu: Gpu, name: str) -> None:
    assert set(EVERY) == set(gpu.fused.SPECS)
    check_fused(gpu, name, features=72, columns=320, bias=torch.float32, bias_scale=True)


@pytest.mark.parametrize("name", SOME)
def test_epilogues_of_types_and_shapes(gpu: Gpu, name: str) -> None:
    check_fused(gpu, name, dtype=torch.float16, scales=torch.float16, index=torch.int32)
    check_fused(gpu, name, (70, 0, 200), features=8, columns=8, scales=None, tail=0)
    for size in (1, 17, 33, 49, 64, 129):
        check_fused(gpu, name, (size,), features=72, columns=136, tail=size % 5)


@pytest.mark.parametrize("name", SOME)
def test_epilogues_with_weights_stored_transposed(gpu: Gpu, name: str) -> None:
    check_fused(gpu, name, features=136, columns=320, bias=torch.float32, bias_scale=True, transposed=True)
    check_fused(gpu, name, (70, 0, 200), dtype=torch.float16, features=72, columns=136, tail=0, transposed=True)


@pytest.mark.parametrize("want_scales", [False, True])
@pytest.mark.parametrize("want_hidden", [False, True])
def test_gradients_that_are_wanted(gpu: Gpu, want_hidden: bool, want_scales: bool) -> None:
    case = gpu.fused.Case(gpu.fused.SPECS["silu glu"], RAGGED)
    for bias in (None, torch.bfloat16, torch.float16) if want_scales else (None,):
        gpu.fused.check_backward(case, want_hidden=want_hidden, want_scales=want_scales, bias_dtype=bias)


def test_epilogues_of_many_groups(gpu: Gpu) -> None:
    check_fused(gpu, "silu glu", tuple(g * 7 % 5 for g in range(70)), features=72, columns=136, bias=torch.bfloat16)


def test_epilogues_and_the_edges(gpu: Gpu) -> None:
    check_fused(gpu, gated("silu", None, 1.0, 0.0, interleaved(128)), columns=384)  # blocks as wide as half a tile
    gpu.fused.test_nothing()
    gpu.fused.test_nan_of_a_group_stays_in_it()
    gpu.fused.test_the_bias_changes_nothing_else("gpt-oss")
    gpu.fused.test_weights_and_biases_anywhere_in_memory()


@pytest.mark.parametrize("seed", [1, 2])
def test_epilogues_in_any_order_of_threads(gpu: Gpu, seed: int) -> None:
    with gpu.emulation.shuffled(seed):
        for name in SOME:
            check_fused(gpu, name)


@pytest.mark.parametrize("kind", ["any", "absent", "one", "few"])
@pytest.mark.parametrize("number", range(11))
def test_routing(gpu: Gpu, number: int, kind: str) -> None:
    tokens, slots, experts = gpu.routing.SHAPES[number]
    gpu.routing.test_route_sorts_stably(tokens, slots, experts, kind)
    if tokens < 100 and kind in ("any", "absent"):
        gpu.routing.test_rows_of_any_number(tokens, slots, experts, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_to_experts_and_back(gpu: Gpu, dtype: torch.dtype) -> None:
    for columns, slots, kind in ((5, 3, "any"), (8, 8, "absent"), (520, 4, "absent"), (12, 1, "any")):
        gpu.routing.move(13, slots, 6, columns, dtype, kind)
    gpu.routing.test_numbers_of_slots(dtype)
    gpu.routing.test_route_brings_weights_of_any_type(torch.float16)
    gpu.routing.test_rows_with_a_pitch()
    gpu.routing.test_ids_that_lie_stay_inside()


@pytest.mark.parametrize("seed", [1, 2])
def test_routing_in_any_order_of_threads(gpu: Gpu, seed: int) -> None:
    with gpu.emulation.shuffled(seed):
        gpu.routing.test_route_sorts_stably(1000, 7, 300, "absent")
        gpu.routing.move(13, 4, 6, 72, torch.bfloat16, "absent")


@pytest.mark.parametrize("name", ["plain", "gpt-oss", "biases", "not gated", "absent", "absent, transposed", "nothing"])
def test_routed_layer(gpu: Gpu, name: str) -> None:
    gpu.routed.test_trains(name)
    gpu.routed.test_called_gives_the_bits_of_the_trained(name)
    with pytest.MonkeyPatch.context() as patch:
        gpu.routed.test_sliced_gradients_are_the_same(name, patch)


@pytest.mark.parametrize("frozen", range(7))
def test_routed_layer_with_frozen_parts(gpu: Gpu, frozen: int) -> None:
    gpu.routed.test_frozen_parts_change_nothing_else(frozen)


def test_routed_layer_and_autograd(gpu: Gpu) -> None:
    gpu.routed.test_backward_twice()
    gpu.routed.test_tokens_that_changed_are_an_error()
    gpu.routed.test_profile_names_the_call()


@pytest.mark.parametrize("shapes", ["ALIGNED", "EVEN", "ODD", "MIXED"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_any_shapes(gpu: Gpu, layout: Layout, shapes: str) -> None:
    ragged, groups = gpu.ragged, getattr(gpu.ragged, shapes)
    for dtype, wide in product(HALVES, (None, torch.float32)):
        ragged.check(ragged.Case(layout, groups, dtype=dtype, out_dtype=wide, fresh=wide is None))
    ragged.check(ragged.Case(layout, groups, shift=1, beta=1.0, index=torch.int32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_any_shapes_with_factors(gpu: Gpu, layout: Layout) -> None:
    ragged = gpu.ragged
    for groups, wide in ((ragged.ALIGNED, None), (ragged.ODD, torch.float32)):
        ragged.check(ragged.Case(layout, groups, out_dtype=wide, alpha="groups", beta="groups"))
        ragged.check(ragged.Case(layout, groups, out_dtype=wide, alpha=0.5, beta=0.0))
    ragged.check(ragged.Case(layout, ((40, 37, 24), (3, 37, 0)), bias=torch.bfloat16, beta=1.0, uniform=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_groups_of_any_shapes(gpu: Gpu, layout: Layout) -> None:
    ragged = gpu.ragged
    counts = [(1, 1), (65, 8), (512, 1)]
    for count, step in counts if layout is Layout.NN else counts[:2]:  # the GPU's tests take the most in each
        most = (20, 24, 16) if count > 1 else (300, 600, 90)
        ragged.check(ragged.Case(layout, ragged.any_shapes(count, 2, most, step), fresh=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edges_of_any_shapes(gpu: Gpu, layout: Layout) -> None:
    gpu.ragged.test_nothing(layout)
    gpu.ragged.test_operands_that_fill_their_memory(layout)
    gpu.ragged.test_dims_that_lie_stay_inside(layout)
    gpu.ragged.test_dims_that_all_groups_share(layout)
    gpu.ragged.test_equal_shapes_give_the_bits_of_the_grouped_gemm(layout)
    gpu.ragged.test_autograd_through_the_door(layout)
    gpu.ragged.check(gpu.ragged.Case(layout, ((1290, 515, 71), (16, 24, 600))))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_any_shapes_in_any_order_of_threads(gpu: Gpu, layout: Layout, seed: int) -> None:
    with gpu.emulation.shuffled(seed):
        for groups in (gpu.ragged.ALIGNED, gpu.ragged.MIXED):
            gpu.ragged.check(gpu.ragged.Case(layout, groups))
