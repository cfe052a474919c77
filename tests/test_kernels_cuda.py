"""The grouped GEMM kernels against float64, one launch at a time; needs an H100 or H200 and the built extension.

Everything that must not be read is NaN and everything that must not be written is checked bit by bit: the tail of the
token buffer, the columns between a row's end and its pitch, the rows before and after the output.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from fusible.ops.kernels.hopper import gemm as hopper  # noqa: E402
from fusible.ops.kernels.problem import GroupedGemm, Layout  # noqa: E402

pytestmark = pytest.mark.cuda
if not torch.cuda.is_available() or hopper.device_refusal(torch.cuda.current_device()) is not None:
    pytest.skip("needs a Hopper GPU and the built extension", allow_module_level=True)

from fusible.ops import _C  # noqa: E402


def variants(layout: Layout, wide: bool = False) -> list[int]:
    """Every tile that is built for the layout and results of 16 bits, or of 32 (``wide``); -1 is the chosen one."""
    return [-1, *(_C.WIDE_TILE_VARIANTS if wide else _C.TILE_VARIANTS)[hopper.LAYOUTS[layout]]]


TILES = [(layout, variant) for layout in Layout for variant in variants(layout)]
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
RAGGED = (131, 0, 77, 304, 1, 512)


@dataclass(frozen=True)
class Case:
    """One problem: static shapes, the sizes of the groups, and what is asked for."""

    layout: Layout
    sizes: tuple[int, ...]
    k: int = 136  # for TN: rows of the result
    n: int = 200
    tail: int = 37
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    accumulate: bool = False
    bias: torch.dtype | None = None
    row_scale: bool = False
    bias_scale: bool = False
    alpha: float | str = 1.0  # "groups": one for each
    beta: float | str = 1.0  # with accumulate; "groups": one for each, 0 and 1 among them
    separate: bool = False  # weights, their gradients and biases anywhere in memory
    index: torch.dtype = torch.int32
    pitch: int = 0  # elements between a row's end and the next
    variant: int = -1
    dynamic: bool = True  # tasks on demand, or a static schedule


class Problem:
    """The tensors of a case. Every view lies inside a buffer of NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator("cuda").manual_seed(len(case.sizes) * 1000 + case.n)
        self.starts = [sum(case.sizes[:g]) for g in range(len(case.sizes))]
        self.tokens = sum(case.sizes) + case.tail
        self.member = torch.full((self.tokens,), -1, dtype=torch.long)
        for g, (start, size) in enumerate(zip(self.starts, case.sizes, strict=True)):
            self.member[start : start + size] = g
        self.member = self.member.cuda()
        self.valid = self.member >= 0

        def view(*shape: int, dtype: torch.dtype, scale: float = 1.0, rows_are_tokens: bool = False) -> torch.Tensor:
            """Random numbers inside a buffer of NaN, with a pitch, NaN in rows of no group."""
            rows = math.prod(shape[:-1])
            buffer = torch.full((rows + 32, shape[-1] + case.pitch), math.nan, dtype=dtype, device="cuda")
            inner = buffer[16 : 16 + rows, : shape[-1]]
            inner.copy_(torch.randn(inner.shape, generator=generator, device="cuda") * scale)
            if rows_are_tokens:
                inner[~self.valid] = math.nan
            return inner.unflatten(0, shape[:-1]) if len(shape) > 2 else inner

        experts, out_dtype = len(case.sizes), case.out_dtype or case.dtype
        tokens = {"dtype": case.dtype, "rows_are_tokens": True}
        if case.layout is Layout.TN:
            self.a, self.b = view(self.tokens, case.k, **tokens), view(self.tokens, case.n, **tokens)
            self.out = view(experts, case.k, case.n, dtype=out_dtype)
        else:
            shape = (case.n, case.k) if case.layout is Layout.NT else (case.k, case.n)
            self.a = view(self.tokens, case.k, **tokens)
            self.b = view(experts, *shape, dtype=case.dtype, scale=case.k**-0.5)
            self.out = view(self.tokens, case.n, dtype=out_dtype)
        self.bias = (
            None
            if case.bias is None
            else torch.randn(experts, case.n, generator=generator, device="cuda").to(case.bias)
        )
        scale = torch.rand(self.tokens, generator=generator, device="cuda").masked_fill(~self.valid, math.nan)
        self.row_scale = scale + 0.5 if case.row_scale else None
        self.bias_scale = (1.5 - scale) if case.bias_scale else None
        self.alphas = torch.rand(experts, generator=generator, device="cuda") + 0.5 if case.alpha == "groups" else None
        self.betas = self._betas(generator) if case.beta == "groups" else None
        if not case.accumulate:
            self.out.fill_(-77.0)  # a number: a tail of NaN could not be told from a NaN that was written
        self.before = self.out.clone()
        unread = self.beta_of_groups() == 0
        if case.layout is not Layout.TN:
            unread = self.valid & unread[self.member.clamp(min=0)]
        self.out[unread] = math.nan  # beta = 0 does not read
        self.given_b = anywhere(self.b) if case.separate and case.layout is not Layout.TN else self.b
        self.given_out = anywhere(self.out) if case.separate and case.layout is Layout.TN else self.out
        self.given_bias = anywhere(self.bias) if case.separate and self.bias is not None else self.bias
        self.sizes = torch.tensor(case.sizes, dtype=case.index, device="cuda")

    def _betas(self, generator: torch.Generator) -> torch.Tensor:
        betas = torch.rand(len(self.case.sizes), generator=generator, device="cuda") * 2 - 1
        betas[::3], betas[1::5] = 0.0, 1.0
        return betas

    def beta_of_groups(self) -> torch.Tensor:
        """What stands in the result counts this much: [E]."""
        number = self.case.beta if isinstance(self.case.beta, float) else 1.0
        return torch.full((len(self.case.sizes),), number, device="cuda") if self.betas is None else self.betas

    def result(self) -> torch.Tensor:
        """What was written; where the matrices are separate, put together."""
        return torch.stack(self.given_out) if isinstance(self.given_out, list) else self.given_out

    def launch(self) -> None:
        case = self.case
        hopper.launch(
            case.layout,
            self.a,
            self.given_b,
            self.given_out,
            self.sizes,
            bias=self.given_bias,
            row_scale=self.row_scale,
            bias_scale=self.bias_scale,
            alpha=case.alpha if isinstance(case.alpha, float) else 1.0,
            alphas=self.alphas,
            accumulate=case.accumulate,
            beta=case.beta if isinstance(case.beta, float) else 1.0,
            betas=self.betas,
            variant=case.variant,
            dynamic=case.dynamic,
        )

    def expected(self) -> torch.Tensor:
        """In float64; rows of no group keep what stood there."""
        case, result, betas = self.case, self.before.double(), self.beta_of_groups().double()
        for g, (start, size) in enumerate(zip(self.starts, case.sizes, strict=True)):
            rows = slice(start, start + size)
            a = self.a[rows].double()
            if case.layout is Layout.TN:
                value = a.T @ self.b[rows].double()
            else:
                value = a @ (self.b[g].double().T if case.layout is Layout.NT else self.b[g].double())
            value = value * (self.alphas[g].double() if self.alphas is not None else case.alpha)
            if self.bias is not None:
                value = value + self.bias[g].double() * (
                    1 if self.bias_scale is None else self.bias_scale[rows, None].double()
                )
            if self.row_scale is not None:
                value = value * self.row_scale[rows, None].double()
            where = g if case.layout is Layout.TN else rows
            result[where] = betas[g] * result[where] + value if case.accumulate else value
        return result

    def check(self) -> None:
        """Launches, and compares every element of the result and of its surroundings."""
        case = self.case
        outs = self.given_out if isinstance(self.given_out, list) else [self.given_out]
        surroundings = [(out, buffer_of(out), buffer_of(out).clone()) for out in outs]
        self.launch()
        torch.cuda.synchronize()
        want, got = self.expected(), self.result().double()
        depth = max(case.sizes, default=1) if case.layout is Layout.TN else 1
        old = self.before.double().abs()
        roundings = want.abs()
        if case.accumulate:  # what stood there times beta, the product, then the sum
            roundings = roundings + (want.abs() + old if case.beta == 1.0 else want.abs() + 3 * old)
        tolerance = roundings * HALF_STEP[self.out.dtype] * 1.02 + 1e-4 * max(1, depth) ** 0.5
        wrong = ~((got - want).abs() <= tolerance)
        worst = (got - want).abs()[wrong].max() if wrong.any() else 0
        assert not wrong.any(), f"{int(wrong.sum())} wrong, the worst off by {worst:.3g}, first at {wrong.nonzero()[0]}"
        if case.layout is not Layout.TN:
            assert torch.equal(self.out[~self.valid], self.before[~self.valid]), "wrote into rows of no group"
        bits = torch.int32 if self.out.element_size() == 4 else torch.int16  # NaN must stay the same NaN
        for out, buffer, around in surroundings:
            outside = torch.ones_like(buffer, dtype=torch.bool)
            torch.as_strided(outside, out.shape, out.stride(), out.storage_offset()).fill_(False)
            assert torch.equal(buffer.view(bits)[outside], around.view(bits)[outside]), "wrote outside the result"


def buffer_of(out: torch.Tensor) -> torch.Tensor:
    """All of the tensor whose view it is."""
    return out if out._base is None else out._base


def anywhere(stacked: torch.Tensor) -> list[torch.Tensor]:
    """The same matrices (or vectors), each in a buffer of NaN of its own, in no order and at no equal distances."""
    shuffler, places = random.Random(len(stacked)), {}
    for g in shuffler.sample(range(len(stacked)), len(stacked)):
        before, rows = 8 * shuffler.randint(1, 40), stacked[g].numel() // stacked.shape[-1]
        pitch = stacked.stride(-2) if stacked.dim() == 3 else stacked.shape[-1]
        buffer = torch.full((before + rows * pitch + 8,), math.nan, dtype=stacked.dtype, device="cuda")
        places[g] = buffer.as_strided(stacked.shape[1:], stacked.stride()[1:], before).copy_(stacked[g])
    return [places[g] for g in range(len(stacked))]


def check(case: Case, **changes: object) -> None:
    for dynamic in (True, False):
        Problem(replace(case, dynamic=dynamic, **changes)).check()


LAYOUTS = list(Layout)


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_shapes(layout: Layout, variant: int) -> None:
    """Depth and width that no tile divides, groups from none to more than two tiles."""
    for k, n in [(8, 8), (8, 136), (136, 8), (64, 256), (72, 264), (136, 768), (520, 392), (768, 1536), (2880, 200)]:
        check(Case(layout, RAGGED, k=k, n=n, variant=variant))
    check(Case(layout, (300, 0, 20), k=1536, n=2880, variant=variant))


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
        check(Case(layout, (size,), tail=size % 5, variant=variant))


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
        check(case)
        check(case, pitch=24)


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
        check(case, variant=variant)
        check(case, variant=variant, alpha="groups", accumulate=True)
        check(case, variant=variant, alpha=0.75)


@pytest.mark.parametrize(("layout", "variant"), TILES)
def test_many_groups(layout: Layout, variant: int) -> None:
    torch.manual_seed(0)
    for experts, most in [(3, 400), (8, 700), (65, 200), (128, 3), (128, 260), (512, 2), (512, 140)]:
        sizes = tuple(torch.randint(0, most, (experts,)).tolist())
        check(Case(layout, sizes, k=72, n=136, tail=11, index=torch.int64, variant=variant))
        check(Case(layout, sizes, k=72, n=136, variant=variant))
    everything = tuple(900 if g == 40 else 0 for g in range(64))
    check(Case(layout, everything, variant=variant))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", [(700, 90, 1300), (131, 0, 77, 1)])
def test_sums_of_long_and_short_groups(sizes: tuple[int, ...], wide: bool) -> None:
    """What stands in an fp32 weight gradient is added in the cache, or fetched, depending on the tokens a group has."""
    case = Case(Layout.TN, sizes, k=264, n=520, out_dtype=torch.float32 if wide else None, accumulate=True)
    for variant in variants(Layout.TN, wide):
        check(case, variant=variant)


def check_halved(sizes: tuple[int, ...], k: int, n: int, wide: bool) -> None:
    """Tiles that may be halved against float64, and bit by bit against whole ones."""
    out_dtype = torch.float32 if wide else None
    for accumulate in (False, True):
        case = Case(Layout.TN, sizes, k=k, n=n, out_dtype=out_dtype, accumulate=accumulate)
        check(case)
        halved, *whole = (Problem(replace(case, variant=variant)) for variant in (-1, *variants(Layout.TN, wide)))
        for problem in (halved, *whole):
            problem.launch()
        assert any(torch.equal(halved.out, problem.out) for problem in whole)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("k", [136, 520, 1536])
@pytest.mark.parametrize("sizes", [(2500,), (0, 900, 0, 3), (700, 701), (40,) * 130], ids=len)
def test_tiles_of_few_long_groups_are_halved(sizes: tuple[int, ...], k: int, wide: bool) -> None:
    """Also where most groups are empty; many groups of one length fill the GPU as they are."""
    check_halved(sizes, k, 264, wide)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing(layout: Layout) -> None:
    """All groups empty, with and without a buffer of tokens."""
    for tail, accumulate in product([0, 50], [False, True]):
        check(Case(layout, (0, 0, 0), tail=tail, accumulate=accumulate))
        check(Case(layout, (0, 0, 0), tail=tail, accumulate=accumulate, out_dtype=torch.float32, pitch=8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_lie_stay_inside(layout: Layout) -> None:
    """Negative sizes and sums beyond the buffer are cut off: (-5, 150, 2^30, 77) of 400 rows mean (0, 150, 250, 0)."""
    problem = Problem(Case(layout, (0, 150, 250, 0), tail=0))
    problem.sizes = torch.tensor([-5, 150, 1 << 30, 77], dtype=torch.int32, device="cuda")
    problem.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeats_are_bitwise_equal(layout: Layout) -> None:
    outputs = [(variant, wide) for wide in (torch.float32, None) for variant in variants(layout, wide is not None)]
    for (variant, out_dtype), accumulate in product(outputs, [False, True]):
        sizes = 700, 0, 1301, 5
        problem = Problem(
            Case(layout, sizes, k=520, n=776, out_dtype=out_dtype, accumulate=accumulate, variant=variant)
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
    problem = Problem(Case(layout, vectors[0], k=136, n=520, tail=0))
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
        Problem(Case(Layout.NT, RAGGED, k=264, n=520)),
        Problem(Case(Layout.TN, (500, 3, 0, 900), k=264, n=392)),
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
    problem = Problem(Case(Layout.NT, (5, 6), k=136, n=200))
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
        check(case)
        check(case, accumulate=True)
        check(case, bias=dtype, alpha="groups")
        check(case, bias=torch.float32, accumulate=True, beta="groups")
    for variant in variants(layout):
        check(Case(layout, sizes, k=392, n=776, separate=True, variant=variant))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_anywhere_give_the_same_bits(layout: Layout) -> None:
    """Also from a graph, where the addresses are those of the capture."""
    for separate in (False, True):
        problem = Problem(Case(layout, RAGGED, bias=torch.bfloat16, separate=separate))
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
        check(case)
        check(case, pitch=24, index=torch.int64)
        check(case, n=776)
    check(Case(layout, tuple(g % 5 for g in range(512)), beta=beta, accumulate=True, separate=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alpha_and_beta_through_the_door(layout: Layout) -> None:
    """As the backend is called: numbers, tensors of one number, tensors of one for each group, in any dtype."""
    case = Case(layout, RAGGED, accumulate=True)
    numbers = torch.linspace(-1, 2, len(RAGGED), device="cuda", dtype=torch.float64)
    for alpha, beta in product(
        [None, 0.5, torch.tensor(0.5, device="cuda"), numbers], [None, 0, 1, 0.5, torch.tensor(0.5), numbers]
    ):
        problem, how = Problem(case), {"alpha": alpha, "beta": beta}
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
            check(case, variant=variant, alpha=0.5)


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
