"""Passes of low rank over rows on the CPU (tests/emulation): the checks of a GPU, on small problems."""

from __future__ import annotations

import pytest
import torch
from checks import lora, low_rank
from checks.low_rank import Case, cases
from emulation import build, harness

from fusible import config
from fusible.ops.kernels.dispatch import low_rank_refusal
from fusible.ops.kernels.doors import low_rank as passes
from fusible.ops.kernels.hopper import low_rank as kernel
from fusible.ops.kernels.problems.gemm import Layout

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]

RAGGED = (131, 0, 77, 1, 64)


@pytest.mark.parametrize("case", cases(sizes=RAGGED), ids=str)
def test_what_is_wanted(case: Case) -> None:
    low_rank.check("cpu", case)


@pytest.mark.parametrize(("rank", "columns"), [(8, 8), (8, 136), (24, 264), (40, 64)])
def test_ranks_and_columns(rank: int, columns: int) -> None:
    for case in cases(sizes=RAGGED, rank=rank, columns=columns):
        low_rank.check("cpu", case)


@pytest.mark.parametrize("layout", list(Layout)[:2])
def test_warps_with_several_chunks_of_columns(layout: Layout) -> None:
    """Six warps with 192 columns each, of which the last has fewer."""
    for wants in ("rows product", "rows product gradient"):
        low_rank.check("cpu", Case(layout, (33, 0, 40), 1096, top_k=2, wants=wants))


@pytest.mark.parametrize(("rank", "columns"), [(64, 776), (16, 2056)])
@pytest.mark.parametrize("layout", list(Layout)[:2])
def test_columns_of_several_blocks(layout: Layout, rank: int, columns: int) -> None:
    """The shares of a row's product are added up by another kernel."""
    low_rank.check("cpu", Case(layout, (33, 0, 40), columns, rank, top_k=2))
    low_rank.check("cpu", Case(layout, (33, 0, 40), columns, rank, wants="product"))


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1,), (2000,), tuple(g * 7 % 5 for g in range(70))], ids=len)
@pytest.mark.parametrize("tail", [0, 11])
def test_sizes(sizes: tuple[int, ...], tail: int) -> None:
    """Groups of many blocks, whose parts another kernel adds; blocks of many groups, and of none."""
    for case in cases(sizes=sizes, columns=24, tail=tail):
        if sum(sizes) or case.top_k == 0:
            low_rank.check("cpu", case)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"gradient_dtype": torch.float32},
        {"dtype": torch.float16, "gradient_dtype": torch.float32, "rank": 32},
        {"pitch": 24, "index": torch.int64},
    ],
    ids=str,
)
def test_types_and_strides(options: dict[str, object]) -> None:
    for case in cases(sizes=RAGGED, **options):
        low_rank.check("cpu", case)


@pytest.mark.parametrize("sizes", [RAGGED, (20, 32, 17), (192,)], ids=["ragged", "pairs of blocks", "all blocks"])
def test_any_order_of_threads_gives_the_same_bits(emulation: harness.Emulation, sizes: tuple[int, ...]) -> None:
    """So whichever of the blocks that share a group adds up their parts."""
    case = Case(Layout.NN, sizes, top_k=3, gradient_dtype=torch.float32)
    in_order = low_rank.check("cpu", case)
    for seed in range(1, 5):
        with emulation.shuffled(seed):
            for first, second in zip(in_order, low_rank.check("cpu", case), strict=True):
                assert first is not None
                assert torch.equal(first.nan_to_num(), second.nan_to_num())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rank": 12}, "multiples of 8"),
        ({"rank": 72}, "up to 64"),
        ({"columns": 68}, "multiples of 8 features"),
        ({"pitch": 4}, "multiples of 8 features"),
        ({"dtype": torch.float32}, "needs bfloat16 or float16"),
        ({"dtype": torch.float16, "gradient_dtype": torch.bfloat16}, "gives gradients of"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, object], why: str) -> None:
    refused = kernel.refusal(low_rank.problem("cpu", Case(Layout.NN, RAGGED, **options)))  # type: ignore[arg-type]
    assert refused is not None
    assert why in refused


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of passes that one kernel has made; it makes all there are."""
    made: list[str] = []
    run = kernel.run
    monkeypatch.setattr(passes, "PASSES", passes.ALL_PASSES)
    monkeypatch.setattr(kernel, "run", lambda p: (made.append(p.kind), run(p)))
    return made


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            (8, 16),
            [
                *("gathered rows product", "product"),
                *("gathered rows product gradient", "gradient", "product gradient", "gathered gradient"),
            ],
        ),
        ((8, 0), ["gathered rows product", "product gradient", "gathered gradient"]),
        ((0, 8), ["product", "gathered rows product gradient", "gradient"]),
        ((96, 8), ["product", "gathered rows product gradient", "gradient"]),
    ],
    ids=str,
)
def test_routed_experts(ranks: tuple[int, int], expected: list[str], kinds: list[str]) -> None:
    """A rank that the kernel does not take runs as products, as it did."""
    lora.check_trains("cpu", ranks)
    assert kinds == expected


def test_a_linear_alone(kinds: list[str]) -> None:
    lora.check_linear("cpu", torch.bfloat16)
    lora.check_linear("cpu", torch.float32)  # of the factors, and so of their gradients
    assert kinds == 2 * ["product", "product gradient", "gradient"]


@pytest.mark.parametrize("frozen", ["lora_a", "lora_b"])
def test_one_factor_is_frozen(frozen: str, kinds: list[str]) -> None:
    lora.check_linear("cpu", torch.bfloat16, frozen)
    assert kinds == ["product", *(["product gradient"] if frozen == "lora_a" else ["product", "gradient"])]


def test_other_backends_make_products() -> None:
    p = low_rank.problem("cpu", Case(Layout.NN, RAGGED))
    with config(backend="loop"):
        assert low_rank_refusal(p) == "config(backend='loop')"
    with config(backend="auto"):
        assert low_rank_refusal(p) is None
