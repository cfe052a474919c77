"""The grouped GEMM kernels against float64, one launch at a time; needs an H100 or H200 and the built extension.

Everything that must not be read is NaN and everything that must not be written is checked bit by bit: the tail of the
token buffer, the columns between a row's end and its pitch, the rows before and after the output.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from checks.device import skip_module_without_hopper
from checks.gemm import (
    Case,
    Problem,
    check,
    check_halved,
    check_one_rounding,
    check_sizes_that_lie_stay_inside,
    check_split,
    variants,
)

from fusible.ops.kernels import extension
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout

pytestmark = pytest.mark.cuda
skip_module_without_hopper()

TILES = [(layout, variant) for layout in Layout for variant in variants(layout)]
RAGGED = (131, 0, 77, 304, 1, 512)
LAYOUTS = list(Layout)


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_shapes(layout: Layout, variant: int) -> None:
    """Depth and width that no tile divides, groups from none to more than two tiles."""
    for k, n in [(8, 8), (8, 136), (136, 8), (64, 256), (72, 264), (136, 768), (520, 392), (768, 1536), (2880, 200)]:
        check("cuda", Case(layout, RAGGED, k=k, n=n, variant=variant))
    check("cuda", Case(layout, (300, 0, 20), k=1536, n=2880, variant=variant))


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_one_group_of_every_size(layout: Layout, variant: int) -> None:
    """At the edges of tiles, and one row into each quarter of 64."""
    for size in (
        1,
        2,
        *range(17, 114, 16),
        63,
        64,
        127,
        128,
        129,
        191,
        192,
        193,
        255,
        256,
        257,
        320,
        384,
        385,
        1000,
        2500,
    ):
        check("cuda", Case(layout, (size,), tail=size % 5, variant=variant))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "wide", "accumulate"), list(product([torch.bfloat16, torch.float16], [False, True], [False, True]))
)
def test_types(layout: Layout, dtype: torch.dtype, wide: bool, accumulate: bool) -> None:
    for variant, (k, n) in product(variants(layout, wide), [(136, 200), (264, 1032)]):
        case = Case(
            layout,
            RAGGED,
            k=k,
            n=n,
            dtype=dtype,
            out_dtype=torch.float32 if wide else dtype,
            accumulate=accumulate,
            variant=variant,
        )
        check("cuda", case)
        check("cuda", case, pitch=24)


@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("row_scale", "bias_scale"), list(product([False, True], [False, True])))
def test_bias_and_scales(layout: Layout, bias: torch.dtype | None, row_scale: bool, bias_scale: bool) -> None:
    outputs = [(variant, wide) for wide in (False, True) for variant in variants(layout, wide)]
    for (variant, wide), dtype in product(outputs, [torch.bfloat16, torch.float16]):
        out_dtype = torch.float32 if wide else dtype
        case = Case(
            layout,
            RAGGED,
            n=520,
            dtype=dtype,
            out_dtype=out_dtype,
            bias=bias,
            row_scale=row_scale,
            bias_scale=bias_scale,
        )
        check("cuda", case, variant=variant)
        check("cuda", case, variant=variant, alpha="groups", accumulate=True)
        check("cuda", case, variant=variant, alpha=0.75)


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_many_groups(layout: Layout, variant: int) -> None:
    torch.manual_seed(0)
    for experts, most in [(3, 400), (8, 700), (65, 200), (128, 3), (128, 260), (512, 2), (512, 140)]:
        sizes = tuple(torch.randint(0, most, (experts,)).tolist())
        check("cuda", Case(layout, sizes, k=72, n=136, tail=11, index=torch.int64, variant=variant))
        check("cuda", Case(layout, sizes, k=72, n=136, variant=variant))
    everything = tuple(900 if g == 40 else 0 for g in range(64))
    check("cuda", Case(layout, everything, variant=variant))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", [(700, 90, 1300), (131, 0, 77, 1)])
def test_sums_of_long_and_short_groups(sizes: tuple[int, ...], wide: bool) -> None:
    """Old values of an fp32 weight gradient are added in the cache or fetched, depending on the tokens of a group."""
    case = Case(Layout.TN, sizes, k=264, n=520, out_dtype=torch.float32 if wide else None, accumulate=True)
    for variant in variants(Layout.TN, wide):
        check("cuda", case, variant=variant)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("k", [136, 520, 1536])
@pytest.mark.parametrize("sizes", [(2500,), (0, 900, 0, 3), (700, 701), (40,) * 130], ids=len)
def test_tiles_of_few_long_groups_are_halved(sizes: tuple[int, ...], k: int, wide: bool) -> None:
    """Also where most groups are empty; many groups of one length fill the GPU as they are."""
    check_halved("cuda", sizes, k, 264, wide)


@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
@pytest.mark.parametrize("sizes", [(8192,), (7, 0, 8000, 150), (4000, 33, 3900)], ids=str)
def test_tiles_of_few_long_groups_are_lower(layout: Layout, sizes: tuple[int, ...]) -> None:
    check("cuda", Case(layout, sizes, k=136, n=2048, variant=9))


@pytest.mark.parametrize("sizes", [(8192,), (1, 0, 20000, 500), (9000, 9000)], ids=str)
def test_depth_of_long_groups_is_split(sizes: tuple[int, ...]) -> None:
    """By choice, since they are few deep tiles, and where it is asked for."""
    for variant in (-1, extension.library().SPLIT_K):
        check_split("cuda", sizes, 768, 1000, variant)


@pytest.mark.parametrize("variant", variants(Layout.TN))
def test_sums_of_16_bits_are_rounded_once(variant: int) -> None:
    for sizes in ((131, 0, 77, 1, 64), (20, 700, 1, 300)):
        check_one_rounding("cuda", sizes, 584, 712, variant)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing(layout: Layout) -> None:
    """All groups empty, with and without a buffer of tokens."""
    for tail, accumulate in product([0, 50], [False, True]):
        check("cuda", Case(layout, (0, 0, 0), tail=tail, accumulate=accumulate))
        check("cuda", Case(layout, (0, 0, 0), tail=tail, accumulate=accumulate, out_dtype=torch.float32, pitch=8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_lie_stay_inside(layout: Layout) -> None:
    check_sizes_that_lie_stay_inside("cuda", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeats_are_bitwise_equal(layout: Layout) -> None:
    outputs = [(variant, wide) for wide in (torch.float32, None) for variant in variants(layout, wide is not None)]
    for (variant, out_dtype), accumulate in product(outputs, [False, True]):
        sizes = 700, 0, 1301, 5
        problem = Problem(
            "cuda", Case(layout, sizes, k=520, n=776, out_dtype=out_dtype, accumulate=accumulate, variant=variant)
        )
        problem.launch()
        first = problem.out.clone()
        for _ in range(10):
            problem.out.copy_(problem.before)
            problem.launch()
            assert torch.equal(problem.out.view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_replay_with_other_sizes(layout: Layout) -> None:
    vectors = [
        (100, 0, 200, 3, 1, 60),
        (0, 131, 1, 0, 200, 5),
        (0, 0, 0, 0, 0, 0),
        (0, 0, 364, 0, 0, 0),
        (60, 60, 61, 61, 61, 61),
        (1, 1, 1, 1, 1, 1),
    ]
    problem = Problem("cuda", Case(layout, vectors[0], k=136, n=520, tail=0))
    problem.a.nan_to_num_(0.5), problem.b.nan_to_num_(0.5)
    assert problem.sizes is not None
    problem.launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.launch()
    for vector in vectors:
        problem.sizes.copy_(torch.tensor(vector))
        problem.out.fill_(-77.0)
        graph.replay()
        replayed = problem.out.clone()
        problem.out.fill_(-77.0)
        problem.launch()
        assert torch.equal(problem.out, replayed)


def test_two_streams() -> None:
    """Two problems interleaved on two streams give what each gives alone."""
    problems = [
        Problem("cuda", Case(Layout.NT, RAGGED, k=264, n=520)),
        Problem("cuda", Case(Layout.TN, (500, 3, 0, 900), k=264, n=392)),
    ]
    alone = []
    for problem in problems:
        problem.launch()
        alone.append(problem.out.clone())
        problem.out.copy_(problem.before)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(1000):
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                problem.launch()
    torch.cuda.synchronize()
    for problem, want in zip(problems, alone, strict=True):
        assert torch.equal(problem.out, want)


def test_more_than_2_to_the_31_elements() -> None:
    tokens, n, k = 150_000, 16_384, 64
    a, b = (
        torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16),
        torch.randn(2, n, k, device="cuda", dtype=torch.bfloat16),
    )
    out = torch.full((tokens, n), math.nan, device="cuda", dtype=torch.bfloat16)
    hopper.launch(Layout.NT, a, b, out, torch.tensor([20_000, 130_000], device="cuda"))
    for start, stop, g in [(0, 1000, 0), (19_000, 20_000, 0), (20_000, 21_000, 1), (149_000, 150_000, 1)]:
        want = a[start:stop].double() @ b[g].double().T
        assert ((out[start:stop].double() - want).abs() <= want.abs() * 2.0**-8 * 1.02 + 1e-3).all()
    assert not out.isnan().any()


def test_errors_name_the_problem() -> None:
    problem = Problem("cuda", Case(Layout.NT, (5, 6), k=136, n=200))
    with pytest.raises(
        RuntimeError,
        match=r"n must be a positive multiple of 8\. grouped GEMM NT bf16 -> bf16, 2 groups, 48 tokens, n 196, k 136",
    ):
        hopper.launch(Layout.NT, problem.a, problem.b, problem.out[:, :196], problem.sizes)
    with pytest.raises(RuntimeError, match="there is no tile variant 99"):
        hopper.launch(Layout.NT, problem.a, problem.b, problem.out, problem.sizes, variant=99)
    with pytest.raises(RuntimeError, match="not aligned to 16 bytes"):
        hopper.launch(Layout.NT, problem.a[:, 4:132], problem.b[:, :, :128], problem.out, problem.sizes)


@pytest.mark.parametrize("experts", [1, 3, 65, 512])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_anywhere(layout: Layout, experts: int) -> None:
    """Weights, their gradients and biases that lie at no equal distances are read and written where they lie."""
    torch.manual_seed(1)
    sizes = tuple(torch.randint(0, 2000 // experts + 3, (experts,)).tolist())
    for dtype, wide in (
        product([torch.bfloat16, torch.float16], [False, True]) if experts < 512 else [(torch.bfloat16, True)]
    ):
        out_dtype, pitch = (torch.float32, 24) if wide else (None, 0)
        case = Case(layout, sizes, k=136, n=200, dtype=dtype, out_dtype=out_dtype, pitch=pitch, separate=True)
        check("cuda", case)
        check("cuda", case, accumulate=True)
        check("cuda", case, bias=dtype, alpha="groups")
        check("cuda", case, bias=torch.float32, accumulate=True, beta="groups")
    for variant in variants(layout):
        check("cuda", Case(layout, sizes, k=392, n=776, separate=True, variant=variant))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_anywhere_give_the_same_bits(layout: Layout) -> None:
    """Also from a graph, where the addresses are those of the capture."""
    for separate in (False, True):
        problem = Problem("cuda", Case(layout, RAGGED, bias=torch.bfloat16, separate=separate))
        problem.launch()
        if not separate:
            want = problem.result().clone()
            continue
        assert torch.equal(problem.result(), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            problem.launch()
        for _ in range(3):
            if layout is Layout.TN:
                torch._foreach_zero_(problem.given_out)
            else:
                problem.out[problem.valid] = 0
            graph.replay()
            assert torch.equal(problem.result(), want)


def test_matrices_far_apart() -> None:
    """More than 16 GB from the lowest to the highest."""
    buffer = torch.empty(18 << 30, dtype=torch.uint8, device="cuda")
    ends = [
        buffer[start : start + 200 * 136 * 2].view(torch.bfloat16).view(200, 136) for start in (17 << 30, 0, 4 << 30)
    ]
    for matrix in ends:
        matrix.copy_(torch.randn(200, 136, device="cuda"))
    x, sizes = torch.randn(77, 136, device="cuda", dtype=torch.bfloat16), torch.tensor([30, 7, 40], device="cuda")
    out, stacked = torch.empty(2, 77, 200, device="cuda", dtype=torch.bfloat16)
    hopper.run(GroupedGemm(Layout.NT, x, ends, sizes, out))
    hopper.run(GroupedGemm(Layout.NT, x, torch.stack(ends), sizes, stacked))
    assert torch.equal(out, stacked)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beta", [0.0, 0.5, -1.25, "groups"])
def test_beta(layout: Layout, beta: float | str) -> None:
    sizes = (131, 0, 77, 304, 1, 0, 512, 3)
    for dtype, wide, alpha in product([torch.bfloat16, torch.float16], [False, True], [1.0, 0.75, "groups"]):
        case = Case(
            layout,
            sizes,
            dtype=dtype,
            out_dtype=torch.float32 if wide else dtype,
            alpha=alpha,
            beta=beta,
            accumulate=True,
        )
        check("cuda", case)
        check("cuda", case, pitch=24, index=torch.int64)
        check("cuda", case, n=776)
    check("cuda", Case(layout, tuple(g % 5 for g in range(512)), beta=beta, accumulate=True, separate=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alpha_and_beta_through_the_door(layout: Layout) -> None:
    """As the backend is called: numbers, tensors of one number, tensors of one for each group, in any dtype."""
    case = Case(layout, RAGGED, accumulate=True)
    numbers = torch.linspace(-1, 2, len(RAGGED), device="cuda", dtype=torch.float64)
    for alpha, beta in product(
        [None, 0.5, torch.tensor(0.5, device="cuda"), numbers], [None, 0, 1, 0.5, torch.tensor(0.5), numbers]
    ):
        problem, how = Problem("cuda", case), {"alpha": alpha, "beta": beta}
        gemm = GroupedGemm(layout, problem.a, problem.b, problem.sizes, problem.out, **on_device(how))
        assert hopper.refusal(gemm) is None
        hopper.run(gemm)
        of = {
            name: torch.as_tensor(1.0 if f is None else f).double().cuda().expand(len(RAGGED))
            for name, f in how.items()
        }
        other = replace(case, alpha="groups", beta="groups", accumulate=beta is not None)
        problem.case, problem.alphas, problem.betas = other, of["alpha"].float(), of["beta"].float()
        want = problem.expected()
        old = problem.before.double().abs() if beta is not None else 0
        assert ((problem.out.double() - want).abs() <= (2 * want.abs() + 6 * old) * 2.0**-8 * 1.02 + 1e-4).all()


def on_device(factors: dict[str, object]) -> dict[str, object]:
    return {name: f.cuda() if isinstance(f, torch.Tensor) else f for name, f in factors.items()}


def test_bias_of_weight_gradients() -> None:
    for accumulate, wide in product([False, True], [False, True]):
        case = Case(
            Layout.TN, RAGGED, bias=torch.bfloat16, accumulate=accumulate, out_dtype=torch.float32 if wide else None
        )
        for variant in variants(Layout.TN):
            check("cuda", case, variant=variant, alpha=0.5)


def test_refusals_say_why() -> None:
    x, weight = (
        torch.zeros(16, 64, device="cuda", dtype=torch.bfloat16),
        torch.zeros(4, 72, 64, device="cuda", dtype=torch.bfloat16),
    )
    out, sizes = torch.zeros(16, 72, device="cuda", dtype=torch.bfloat16), torch.full((4,), 4, device="cuda")
    problem = GroupedGemm(Layout.NT, x, weight, sizes, out)
    assert hopper.refusal(problem) is None
    for changes, words in [
        ({"a": x.cpu()}, "needs a CUDA device, got cpu"),
        ({"a": x.float(), "b": weight.float()}, "needs bfloat16 or float16 operands"),
        ({"out": out.half()}, "gives torch.bfloat16 or float32, not torch.float16"),
        ({"a": x[:, :60], "b": weight[..., :60]}, "multiples of 8, got 60 and 72"),
        ({"a": x[:, 1:57], "b": weight[..., :56]}, "rows of a that are dense and aligned"),
        ({"b": weight.mT.contiguous().mT}, "rows of b that are dense"),
        ({"beta": sizes[:3]}, "a beta for each group or one for all, got shape [3]"),
        (
            {"layout": Layout.TN, "b": out, "out": torch.zeros(4, 64, 72, device="cuda"), "row_scale": out[:, 0]},
            "no rows to scale",
        ),
        ({"b": [*weight[:3], weight[3].mT.contiguous().mT]}, "the same strides"),
        ({"b": [*weight[:3], weight.new_zeros(72 * 64 + 4)[4:].view(72, 64)]}, "aligned to 16 bytes"),
        ({"a": x[:1].expand(1 << 30, 64), "out": out[:1].expand(1 << 30, 72)}, "takes at most 1073741823 rows"),
        ({"split_sizes": sizes.float()}, "int32 or int64"),
    ]:
        assert words in (hopper.refusal(replace(problem, **changes)) or "")
