"""Our Triton kernels in Triton's interpreter against float64, on ragged groups of a few rows; no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton_interpreter
from checks import fused, gemm
from checks.functions import ACTS_OF_COLUMNS, ACTS_OF_MATRICES, PUBLISHED, op_of

from fusible import Pointwise, config
from fusible.fuser import RefusedError
from fusible.ops import kernels
from fusible.ops.kernels.problems.gemm import Activate, GroupedGemm, Layout
from fusible.ops.kernels.pytorch import wrong_sizes
from fusible.ops.kernels.triton import gemm as triton
from fusible.ops.kernels.triton import row_kernels, tiles
from fusible.ops.kernels.triton.shape import ProgramTile
from fusible.ops.programs.program import OPERATIONS
from fusible.ops.programs.triton import CODE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which computes rows of no group, too

SIZES = (5, 0, 1, 19, 16)
TILE = ProgramTile(16, 32, 16, 4, 2, strip=2)
F32, F16 = torch.float32, torch.float16
GEMM = gemm.Case(Layout.NT, SIZES, k=24, n=40, tail=3, dtype=F32, backend=triton.NAME)
FUSED = fused.Case(fused.SPECS["silu glu"], SIZES, 24, 20, tail=3, dtype=F32, backend=triton.NAME)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Any]:
    with triton_interpreter.interpreted() as launch:
        yield launch


@pytest.fixture(
    params=[TILE, TILE._replace(tma=True, part=8), TILE._replace(apart=True)],
    ids=["pointers", "bulk copies", "apart"],
)
def tile(request: pytest.FixtureRequest, interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "tile_of", lambda problem: request.param)


@pytest.fixture
def small(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "tile_of", lambda problem: TILE)


def check(case: gemm.Case, **changes: Any) -> None:
    gemm.Problem("cpu", replace(case, **changes)).check()


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("layout", list(Layout))
def test_products(layout: Layout, dtype: torch.dtype) -> None:
    check(GEMM, layout=layout, dtype=dtype)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("k", "n"), [(17, 33), (1, 1), (7, 40)])
@pytest.mark.parametrize("layout", list(Layout))
def test_odd_features(layout: Layout, k: int, n: int) -> None:
    check(GEMM, layout=layout, k=k, n=n)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("sizes", [(7,), (0,), (0, 0, 3), (33, 0), (1,) * 20])
@pytest.mark.parametrize("layout", list(Layout))
def test_groups(layout: Layout, sizes: tuple[int, ...]) -> None:
    check(GEMM, layout=layout, sizes=sizes, k=16, n=32)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("accumulate", [{"beta": 1.0}, {"beta": "groups"}, {"beta": 0.5, "out_dtype": F32}])
@pytest.mark.parametrize("layout", list(Layout))
def test_sums_into_what_stands_there(layout: Layout, accumulate: dict[str, Any]) -> None:
    check(GEMM, layout=layout, dtype=F16, accumulate=True, pitch=8, **accumulate)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("factors", [{"alpha": 0.5}, {"alpha": "groups", "bias": F16}])
@pytest.mark.parametrize("layout", list(Layout))
def test_factors(layout: Layout, factors: dict[str, Any]) -> None:
    of_rows = {} if layout is Layout.TN else {"row_scale": True, "bias_scale": "bias" in factors}
    check(GEMM, layout=layout, **factors, **of_rows, index=torch.int64)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", list(Layout))
def test_matrices_anywhere_in_memory(layout: Layout) -> None:
    check(GEMM, layout=layout, separate=True, bias=F32, accumulate=layout is Layout.TN)


@pytest.mark.usefixtures("small")
def test_more_matrices_than_addresses_of_a_launch(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_MOST", 8)
    check(GEMM, sizes=tuple([int(i % 4 == 0) for i in range(19)]), k=8, n=8, separate=True)


def test_sizes_out_of_the_buffer(interpreter: Any) -> None:
    plan = interpreter.plan_of(torch.tensor([4, -3, 2**31 - 1, 5, 2**30]), 20, 16)

    assert plan.starts.tolist() == [[0, 4, 4, 20, 20, 20], [0, 1, 1, 2, 2, 2]]
    assert plan.tiles[:7].tolist() == [2, 0, 0, 4, 2, 4, 20]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("sizes", "inside", "why"),
    [
        ([-5, 9, 1 << 30, 7], (0, 9, 11, 0), "the size of group 0 is -5, which is negative"),
        ([8, 30, 2, 1], (8, 12, 0, 0), "the size of group 1 is 30, more than the rows that the groups before it leave"),
    ],
)
@pytest.mark.parametrize("layout", list(Layout))
def test_sizes_that_lie_are_cut_and_reported(
    layout: Layout, sizes: list[int], inside: tuple[int, ...], why: str
) -> None:
    problem = gemm.Problem("cpu", replace(GEMM, layout=layout, sizes=inside, tail=0))
    problem.sizes = torch.tensor(sizes, dtype=torch.int32)
    problem.check()
    with pytest.raises(RuntimeError, match=why):
        wrong_sizes.raise_reported(problem.sizes.device)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("spec", ["silu glu", "gpt-oss", "blocks of 4", "gelu"])
def test_activations_in_the_epilogue(spec: str) -> None:
    case = replace(FUSED, spec=fused.SPECS[spec])
    fused.check_forward("cpu", replace(case, bias=F32, bias_scale=True, transposed=spec == "gpt-oss"), alone=False)
    fused.check_backward("cpu", case)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("spec", [name for name in fused.SPECS if "blocks" not in name])
def test_every_activation(spec: str) -> None:
    case = replace(FUSED, spec=fused.SPECS[spec], sizes=(2, 0, 1), columns=16, features=8, scales=None)
    fused.check_forward("cpu", case)
    fused.check_backward("cpu", case, bias_dtype=None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", PUBLISHED)
def test_functions_of_users(name: str) -> None:
    function, count = PUBLISHED[name]
    case = fused.case_of(op_of(function, count), function, **of_functions())
    fused.check_forward("cpu", case, alone=False)
    fused.check_backward("cpu", case)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ACTS_OF_COLUMNS)
def test_numbers_of_columns(name: str) -> None:
    make, function = ACTS_OF_COLUMNS[name]
    case = fused.case_of(make("concat"), function, **of_functions())
    fused.check_forward("cpu", case)
    fused.check_backward("cpu", case)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ACTS_OF_MATRICES)
def test_numbers_of_elements(name: str) -> None:
    make, function = ACTS_OF_MATRICES[name]
    fused.check_forward("cpu", fused.case_of(make("concat"), function, **of_functions()))


def of_functions() -> dict[str, Any]:
    return {"sizes": (2, 0, 3), "features": 8, "columns": 12, "tail": 3, "dtype": F32, "backend": triton.NAME}


def test_every_operation_has_an_expression() -> None:
    assert CODE.keys() == OPERATIONS.keys()


def test_tanh_is_off_by_a_few_units_in_the_last_place(interpreter: Any) -> None:
    some = torch.logspace(-20, 5, 255, base=2)
    x = torch.cat([-some, some, torch.tensor([torch.inf, torch.nan])])
    sizes, y, link = torch.tensor([len(x)]), torch.empty(len(x), 1), Pointwise(torch.tanh).link
    assert link is not None
    assert link.forward_spec is not None
    epilogue = Activate(link.forward_spec, None, None)
    interpreter.run(GroupedGemm(Layout.NT, x.unsqueeze(1), torch.ones(1, 1, 1), sizes, y, epilogue=epilogue), TILE)

    exact = x.double().tanh()
    step = torch.nextafter(exact.float().abs(), torch.tensor(2.0)).double() - exact.float().abs().double()
    assert ((y.squeeze(1) - exact).abs() <= 3 * step)[:-1].all()
    assert y[-1].isnan()


def test_passes_over_rows(interpreter: Any) -> None:
    sizes, rows = torch.tensor(SIZES), torch.randn(sum(SIZES) + 3, 24)
    vectors, sums, dots = torch.randn(len(SIZES), 24), torch.empty(len(SIZES), 24), torch.empty(len(rows))
    valid = sum(SIZES)
    rows[valid:] = torch.nan
    row_kernels.column_sums(rows, sizes, sums, None)
    row_kernels.row_dots(rows, vectors, sizes, dots)

    parts = rows[:valid].split(list(SIZES))
    torch.testing.assert_close(sums, torch.stack([part.sum(0) for part in parts]))
    torch.testing.assert_close(dots[:valid], (rows[:valid] * vectors.repeat_interleave(sizes, 0)).sum(1))
    assert dots[valid:].eq(0).all()
    row_kernels.zero_tail(rows, sizes)
    assert rows[valid:].eq(0).all()


def test_a_scale_with_gaps(interpreter: Any) -> None:
    sizes, rows, scales = torch.tensor(SIZES), torch.randn(sum(SIZES), 24), torch.rand(sum(SIZES), 2)
    sums = torch.full((len(SIZES), 24), torch.nan)
    row_kernels.column_sums(rows, sizes, sums, scales[:, 1])

    parts = (rows.double() * scales[:, 1:].double()).split(list(SIZES))
    torch.testing.assert_close(sums.double(), torch.stack([part.sum(0) for part in parts]), rtol=1e-5, atol=1e-5)


def test_rows_that_are_one_in_memory_come_without_bulk_copies(interpreter: Any) -> None:
    row = torch.randn(1, 24)

    assert interpreter.is_aligned(row.repeat(4, 1))
    assert not interpreter.is_aligned(row.expand(4, 24))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    a, sizes = torch.zeros(4, 8), torch.tensor([4])
    problem = GroupedGemm(Layout.NT, a, a[None], sizes, a)

    assert triton.refusal(problem) == "needs a CUDA device, got cpu"
    with config(backend="triton"), pytest.raises(RefusedError, match="triton needs a CUDA device, got cpu"):
        kernels.grouped_gemm(Layout.NT, a, a[None], sizes)


@pytest.mark.usefixtures("interpreter")
def test_refusals_of_operands() -> None:
    a, sizes = torch.zeros(4, 8, dtype=torch.float64), torch.tensor([4])
    problem = GroupedGemm(Layout.NT, a, a[None], sizes, a)

    assert triton.refusal(problem) == (
        "needs operands of one of bfloat16, float16 and float32, got torch.float64 and torch.float64"
    )
    a = a.float()
    assert triton.refusal(GroupedGemm(Layout.NT, a, a[None], sizes.expand(4097), a)) == (
        "takes 1 to 4096 groups and at most 1073741823 rows, got 4097 and 4"
    )


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
def test_matrices_too_long_for_offsets_of_32_bits(
    layout: Layout, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are at offsets of 64 bits, the matrices of groups are not: these have more rows than columns."""
    monkeypatch.setattr(triton, "triton_refusal", lambda rows: None)
    many, few, sizes = 2**28, 8, torch.empty(1, dtype=torch.int64, device="meta")
    rows, long = (torch.empty(count, few, dtype=F16, device="meta") for count in (4, many))
    matrix = torch.empty(1, many, few, dtype=F16, device="meta")
    matrices = list(matrix) if listed else matrix
    narrow, wide = rows, torch.empty(4, many, dtype=F16, device="meta")
    problem = {
        Layout.NT: GroupedGemm(Layout.NT, narrow, matrices, sizes, wide),
        Layout.NN: GroupedGemm(Layout.NN, wide, matrices, sizes, narrow),
        Layout.TN: GroupedGemm(Layout.TN, wide, narrow, sizes, matrices),
    }[layout]

    name = "out" if layout is Layout.TN else "b"
    shape = [many, few] if listed else [1, many, few]
    assert triton.refusal(problem) == f"needs matrices of {name} of fewer than 2^31 elements, got shape {shape}"
    if layout is not Layout.TN:
        assert triton.refusal(GroupedGemm(layout, long, matrix[:, :few], sizes, long)) is None


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, name) for layout in (Layout.NT, Layout.NN) for name in ("a", "out")),
        (Layout.TN, "a"),
        (Layout.TN, "b"),
    ],
)
def test_rows_too_far_apart_for_offsets_of_32_bits(layout: Layout, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile begins at an offset of 64 bits; those of its rows from there have 32."""
    monkeypatch.setattr(triton, "triton_refusal", lambda rows: None)

    def refusal(pitch: int) -> str | None:
        tensors = {each: torch.empty(40, 8, dtype=F16, device="meta") for each in ("a", "b", "out")}
        tensors["out" if layout is Layout.TN else "b"] = torch.empty(1, 8, 8, dtype=F16, device="meta")
        tensors[name] = torch.empty_strided((40, 8), (pitch, 1), dtype=F16, device="meta")
        a, b, out = tensors.values()
        return triton.refusal(GroupedGemm(layout, a, b, torch.empty(1, dtype=torch.int64, device="meta"), out))

    assert refusal(2**23 - 8) is None
    assert refusal(2**23) == f"needs rows of {name} that are fewer than 2^23 elements apart, got strides [8388608, 1]"


def test_tiles_have_no_more_rows_than_offsets_of_32_bits_reach() -> None:
    found = {tile for card in tiles.TABLE for kind in tiles.TABLE[card] for tile in tiles.candidates(card, kind)}
    assert max(max(tile.m, tile.k) for tile in found) * 2**23 <= 2**31
