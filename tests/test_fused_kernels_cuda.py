"""The grouped GEMMs that end in an activation or its backward, against float64; needs the built extension and its GPU.

Everything that must not be read is NaN, and everything that must not be written is checked: rows of no group, and the
rows before and after each output.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from fusible.ops import kernels  # noqa: E402
from fusible.ops.activation_spec import ActivationSpec, activation, gated, interleaved  # noqa: E402
from fusible.ops.kernels import unfused  # noqa: E402
from fusible.ops.kernels.hopper import epilogue  # noqa: E402
from fusible.ops.kernels.hopper import gemm as hopper  # noqa: E402
from fusible.ops.kernels.problem import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout  # noqa: E402
from fusible.ops.kernels.pytorch import activation as pointwise  # noqa: E402

pytestmark = pytest.mark.cuda
if not torch.cuda.is_available() or hopper.device_refusal(torch.cuda.current_device()) is not None:
    pytest.skip("needs a Hopper GPU and the built extension", allow_module_level=True)

from fusible.ops import _C  # noqa: E402

NAMES = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid")
SPECS = {
    **{name: activation(name) for name in NAMES},
    **{f"{name} glu": gated(name, None, 1.0, 0.0, "concat") for name in NAMES},
    "clamped": gated("silu", 0.7, 1.702, 1.0, "concat"),
    "gpt-oss": gated("silu", 0.7, 1.702, 1.0, interleaved(1)),
    **{f"blocks of {n}": gated("gelu_tanh", 1.0, 1.0, 0.5, interleaved(n)) for n in (1, 2, 4, 8, 32, 64)},
}
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
RAGGED = (131, 0, 77, 304, 1, 512)
GUARD, POISON = 16, -77.0


@dataclass(frozen=True)
class Case:
    """One problem. ``features`` K, ``columns`` F of the hidden rows, and what is asked for."""

    spec: ActivationSpec
    sizes: tuple[int, ...] = RAGGED
    features: int = 136
    columns: int = 192
    tail: int = 37
    dtype: torch.dtype = torch.bfloat16
    scales: torch.dtype | None = torch.float32
    bias: torch.dtype | None = None
    bias_scale: bool = False
    index: torch.dtype = torch.int64
    transposed: bool = False  # both weights, as the kernels read them
    variant: int = -1

    @property
    def width(self) -> int:
        return self.columns * (2 if self.spec.gated else 1)


class Tensors:
    """Inputs of both directions, NaN around them and in rows of no group."""

    def __init__(self, case: Case) -> None:
        self.case, self.generator = case, torch.Generator("cuda").manual_seed(len(case.sizes) * 1000 + case.columns)
        self.valid, experts = sum(case.sizes), len(case.sizes)
        self.tokens = self.valid + case.tail
        self.x, self.dy = self.rows(case.features), self.rows(case.features)
        self.w1 = self.random(experts, case.width, case.features) * case.features**-0.5
        self.w2 = self.random(experts, case.features, case.columns) * case.features**-0.5
        self.scales = None if case.scales is None else (self.rows(1).float().abs() + 0.1).to(case.scales).flatten()
        self.bias = None if case.bias is None else self.random(experts, case.width).to(case.bias)
        self.bias_scale = self.rows(1).float().flatten() if case.bias_scale else None
        self.sizes = torch.tensor(case.sizes, dtype=case.index, device="cuda")

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda").to(self.case.dtype)

    def rows(self, columns: int) -> Tensor:
        """[T, columns]; NaN in the tail, before and after."""
        buffer = torch.full((self.tokens + 2 * GUARD, columns), math.nan, dtype=self.case.dtype, device="cuda")
        buffer[GUARD : GUARD + self.valid] = self.random(self.valid, columns)
        return buffer[GUARD : GUARD + self.tokens]

    def by_group(self, rows: Tensor, weights: Tensor) -> Tensor:
        """``rows @ weights[g].T`` of the valid rows, in float64."""
        parts = torch.split(rows[: self.valid].double(), list(self.case.sizes))
        return torch.cat([part @ w.double().T for part, w in zip(parts, weights, strict=True)])

    def exact_pre(self) -> Tensor:
        pre = self.by_group(self.x, self.w1)
        if self.bias is not None:
            added = self.bias.double().repeat_interleave(self.sizes, dim=0, output_size=self.valid)
            pre += added if self.bias_scale is None else added * self.bias_scale[: self.valid, None].double()
        return pre


def as_stored(t: Tensors, weights: Tensor, layout: Layout) -> tuple[Layout, Tensor]:
    """The weights, transposed in memory if the case says so, and the layout that reads them."""
    if not t.case.transposed:
        return layout, weights
    return Layout.NN if layout is Layout.NT else Layout.NT, weights.mT.contiguous()


def poisoned(t: Tensors, *shape: int, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    """Room for a result inside a buffer of poison; as many rows as tokens if nothing else is said."""
    rows = t.tokens if rows is None else rows
    return torch.full((rows + 2 * GUARD, *shape), POISON, dtype=dtype, device="cuda")[GUARD:-GUARD]


def assert_only_valid_rows_written(t: Tensors, *results: Tensor | None) -> None:
    for result in results:
        if result is not None:
            assert result._base is not None
            assert result._base[:GUARD].eq(POISON).all(), "wrote before the rows"
            assert result._base[GUARD + t.valid :].eq(POISON).all(), "wrote into rows of no group, or after them"


def forward(t: Tensors, keep: bool = True) -> tuple[Tensor | None, Tensor]:
    case = t.case
    pre = poisoned(t, case.width, dtype=case.dtype) if keep else None
    hidden = poisoned(t, case.columns, dtype=case.dtype)
    layout, weights = as_stored(t, t.w1, Layout.NT)
    problem = GroupedGemm(layout, t.x, weights, t.sizes, hidden, bias=t.bias, bias_scale=t.bias_scale)
    problem.epilogue = Activate(case.spec, t.scales, pre)
    assert hopper.refusal(problem) is None
    assert hopper.epilogue_refusal(problem) is None
    places = hopper.place(weights), hopper._NOWHERE if t.bias is None else hopper._bias_place(t.bias)
    epilogue.forward(problem, problem.epilogue, *places, case.variant)
    return pre, hidden


def backward(
    t: Tensors,
    pre: Tensor,
    want_scales: bool = True,
    want_hidden: bool = True,
    bias_dtype: torch.dtype | None = torch.float32,
) -> ActivationGrads:
    case, experts = t.case, len(t.case.sizes)
    wanted = want_scales and t.scales is not None
    out = ActivationGrads(
        poisoned(t, case.width, dtype=case.dtype),
        torch.full_like(t.scales, POISON) if wanted else None,  # type: ignore[arg-type]
        poisoned(t, case.columns, dtype=case.dtype) if want_hidden else None,
        None if bias_dtype is None else poisoned(t, case.width, dtype=bias_dtype, rows=experts),
    )
    layout, weights = as_stored(t, t.w2, Layout.NN)
    problem = GroupedGemm(layout, t.dy, weights, t.sizes, out.pre)
    problem.epilogue = ActivateBackward(case.spec, t.scales, pre, out)
    assert hopper.epilogue_refusal(problem) is None
    epilogue.backward(problem, problem.epilogue, hopper.place(weights), case.variant)
    return out


def assert_near(got: Tensor, expected: Tensor, steps: float = 1.0, absolute: float = 0.0) -> None:
    step = STEP[got.dtype] * steps * 1.02
    wrong = ~((got.double() - expected).abs() <= expected.abs() * step + absolute)
    if wrong.any():
        worst = (got.double() - expected).abs()[wrong].max()
        raise AssertionError(f"{int(wrong.sum())} wrong, the worst off by {worst:.3g}, first at {wrong.nonzero()[0]}")


def check_forward(case: Case) -> None:
    t = Tensors(case)
    pre, hidden = forward(t)
    assert pre is not None
    assert_only_valid_rows_written(t, pre, hidden)
    n, spec = t.valid, case.spec
    assert_near(pre[:n], t.exact_pre(), absolute=2e-4)
    expected = hidden[:n].double().clone()
    pointwise.forward(pre[:n].double(), spec, None if t.scales is None else t.scales[:n].double(), expected)
    assert_near(hidden[:n], expected, absolute=1e-5)
    _, alone = forward(t, keep=False)
    assert torch.equal(alone, hidden), "without the pre-activation the hidden rows differ"


def assert_sums_of_groups(t: Tensors, rows: Tensor, sums: Tensor) -> None:
    """``sums`` [E, C] are those of the rows of each group, in fp32 or a dtype to which that is rounded once."""
    parts = torch.split(rows[: t.valid].double(), list(t.case.sizes))
    expected = torch.stack([part.sum(0) for part in parts])
    size = torch.stack([part.abs().sum(0) for part in parts])
    step = STEP.get(sums.dtype, 0.0) * 1.02
    assert ((sums.double() - expected).abs() <= expected.abs() * step + size * 1e-6).all()
    assert sums._base is not None
    assert torch.cat([sums._base[:GUARD], sums._base[-GUARD:]]).eq(POISON).all(), "wrote beside the sums"


def check_backward(case: Case, **wants: Any) -> None:
    t, n = Tensors(case), sum(case.sizes)
    pre = t.rows(case.width)
    out = backward(t, pre, **wants)
    assert_only_valid_rows_written(t, out.pre, out.hidden)
    dhidden = t.by_group(t.dy, t.w2.mT)
    rounded = t.dy.new_empty(t.tokens, case.columns)
    hopper.launch(Layout.NN, t.dy, t.w2, rounded, t.sizes)  # what the unfused backward would start from
    assert_near(rounded[:n], dhidden, absolute=2e-4)
    scales = None if t.scales is None else t.scales[:n].double()
    if out.bias is not None:
        assert_sums_of_groups(t, out.pre, out.bias)
    truth = ActivationGrads(*(None if r is None else torch.empty_like(r[:n], dtype=torch.float64) for r in out[:3]))
    pointwise.backward(rounded[:n].double(), pre[:n].double(), case.spec, scales, truth)
    assert_near(out.pre[:n], truth.pre, absolute=4e-5)
    if out.hidden is not None:
        assert_near(out.hidden[:n], truth.hidden, absolute=1e-5)
    if out.scales is not None and n:
        size = (rounded[:n].double().norm(dim=1) * pre[:n].double().norm(dim=1)).clamp(min=1)
        step = STEP.get(out.scales.dtype, 1e-5) * 1.02
        error = (out.scales[:n].double() - truth.scales).abs()
        assert (error <= truth.scales.abs() * step + 2e-6 * size).all(), error.max()


def fits(spec: ActivationSpec, variant: int) -> bool:
    """Whether a tile takes blocks of so many columns: a consumer of swap_ab ones (6) stores 128."""
    return spec.block != 128 or variant != 6


FORWARD, BACKWARD = [-1, *_C.ACTIVATION_VARIANTS], [-1, *_C.BACKWARD_VARIANTS]


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_activation(name: str, dtype: torch.dtype) -> None:
    case = Case(SPECS[name], dtype=dtype)
    for variant in FORWARD:
        check_forward(replace(case, variant=variant))
        check_forward(replace(case, variant=variant, bias=torch.float32, bias_scale=True, columns=320))
    for variant in BACKWARD:
        check_backward(replace(case, variant=variant))
        check_backward(replace(case, variant=variant, columns=320))


SHAPES = [
    (8, 8),
    (8, 136),
    (136, 8),
    (64, 128),
    (72, 264),
    (136, 768),
    (520, 200),
    (768, 1536),
    (2880, 136),
    (64, 2880),
]
SOME = ("silu glu", "gpt-oss", "blocks of 8", "relu2")


@pytest.mark.parametrize("name", SOME)
def test_shapes(name: str) -> None:
    """Depth and width that no tile divides."""
    for features, columns in SHAPES:
        case = Case(SPECS[name], features=features, columns=columns)
        for variant in FORWARD:
            check_forward(replace(case, variant=variant))
        for variant in BACKWARD:
            check_backward(replace(case, variant=variant))


def test_blocks_as_wide_as_a_tile() -> None:
    for block, columns in [(128, 384), (128, 640), (16, 48)]:
        spec = gated("silu", None, 1.0, 0.0, interleaved(block))
        case = Case(spec, columns=columns, tail=0)
        for variant in _C.ACTIVATION_VARIANTS:
            with nullcontext() if fits(spec, variant) else pytest.raises(RuntimeError, match="do not fit into a tile"):
                check_forward(replace(case, variant=variant))
        for variant in _C.BACKWARD_VARIANTS:
            check_backward(replace(case, variant=variant))


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("name", ["silu glu", "gpt-oss", "blocks of 8", "blocks of 64", "relu2"])
def test_weights_stored_transposed(name: str, dtype: torch.dtype) -> None:
    case = Case(SPECS[name], dtype=dtype, transposed=True)
    for features, columns in [(136, 192), (72, 320), (8, 64), (520, 832)]:
        for variant in FORWARD:
            check_forward(replace(case, variant=variant, features=features, columns=columns))
        for variant in BACKWARD:
            check_backward(replace(case, variant=variant, features=features, columns=columns))
    for variant in FORWARD:
        check_forward(replace(case, variant=variant, bias=torch.float32, bias_scale=True, columns=320))


@pytest.mark.parametrize("name", SOME)
def test_one_group_of_every_size(name: str) -> None:
    for size in (1, 2, *range(17, 114, 16), 63, 64, 127, 128, 129, 192, 255, 256, 257, 385, 1000):
        case = Case(SPECS[name], (size,), tail=size % 5, features=72, columns=136)
        for variant in FORWARD:
            check_forward(replace(case, variant=variant))
        for variant in BACKWARD:
            check_backward(replace(case, variant=variant))


@pytest.mark.parametrize("experts", [3, 8, 65, 128, 512])
def test_many_groups(experts: int) -> None:
    torch.manual_seed(experts)
    for most in (2, 150):
        sizes = tuple(torch.randint(0, most, (experts,)).tolist())
        case = Case(SPECS["silu glu"], sizes, features=72, columns=136, tail=11, index=torch.int32)
        for variant in _C.ACTIVATION_VARIANTS:
            check_forward(replace(case, variant=variant, bias=torch.bfloat16))
        for variant in _C.BACKWARD_VARIANTS:
            check_backward(replace(case, variant=variant))


@pytest.mark.parametrize("name", ["silu glu", "gpt-oss", "gelu"])
@pytest.mark.parametrize("scales", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bias_and_scales(name: str, scales: torch.dtype | None, bias: torch.dtype | None) -> None:
    for dtype, bias_scale in [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)]:
        check_forward(Case(SPECS[name], dtype=dtype, scales=scales, bias=bias, bias_scale=bias_scale))


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("want_scales", [False, True])
@pytest.mark.parametrize("want_hidden", [False, True])
@pytest.mark.parametrize("scales", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_that_are_wanted(
    scales: torch.dtype | None, want_hidden: bool, want_scales: bool, bias: torch.dtype | None
) -> None:
    for name in SOME:
        for variant in BACKWARD:
            case = Case(SPECS[name], scales=scales, variant=variant)
            check_backward(case, want_hidden=want_hidden, want_scales=want_scales, bias_dtype=bias)


@pytest.mark.parametrize("name", SOME)
def test_the_bias_changes_nothing_else(name: str) -> None:
    for variant in BACKWARD:
        t = Tensors(Case(SPECS[name], columns=320, variant=variant))
        pre = t.rows(t.case.width)
        once, again = backward(t, pre, bias_dtype=None), backward(t, pre)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(once[:3], again[:3], strict=True))


def test_nothing() -> None:
    for tail in (0, 50):
        for name in SOME:
            check_forward(Case(SPECS[name], (0, 0, 0), tail=tail))
            check_backward(Case(SPECS[name], (0, 0, 0), tail=tail))


def test_nan_of_a_group_stays_in_it() -> None:
    t = Tensors(Case(SPECS["silu glu"], (70, 130, 60), tail=0))
    clean, pre = forward(t), t.rows(t.case.width)
    grads = backward(t, pre)
    t.x[70:200], t.dy[70:200], t.w1[1], t.w2[1] = (math.nan,) * 4
    dirty, after = forward(t), backward(t, pre)
    others = [*range(70), *range(200, 260)]
    for one, other in [*zip(clean, dirty, strict=True), *zip(grads[:3], after[:3], strict=True)]:
        assert torch.equal(one[others], other[others])
    assert torch.equal(grads.bias[[0, 2]], after.bias[[0, 2]])
    assert after.bias[1].isnan().all()
    assert dirty[0][70:200].isnan().all()
    assert dirty[1][70:200].isnan().all()


@pytest.mark.parametrize("name", SOME)
def test_repeats_are_bitwise_equal(name: str) -> None:
    case = Case(SPECS[name], (700, 0, 1301, 5), features=520, columns=776)
    for variant in BACKWARD:
        t = Tensors(replace(case, variant=variant))
        pre = t.rows(case.width)
        first = backward(t, pre)
        for _ in range(5):
            again = backward(t, pre)
            assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(first[:3], again[:3], strict=True))
            assert torch.equal(first.bias, again.bias)
    for variant in FORWARD:
        t = Tensors(replace(case, variant=variant))
        once = forward(t)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(once, forward(t), strict=True))


def test_graph_replay_with_other_sizes() -> None:
    t = Tensors(Case(SPECS["silu glu"], (100, 0, 200, 3, 1, 60), tail=0, columns=520))
    pre = t.rows(t.case.width)
    forward(t), backward(t, pre)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = (*forward(t), *backward(t, pre))
    for sizes in [(0, 131, 1, 0, 200, 5), (0, 0, 0, 0, 0, 0), (0, 0, 364, 0, 0, 0), (60, 60, 61, 61, 61, 61)]:
        t.sizes.copy_(torch.tensor(sizes))
        graph.replay()
        direct, n = (*forward(t), *backward(t, pre)), sum(sizes)
        assert all(torch.equal(a[:n], b[:n]) for a, b in zip(replayed[:-1], direct[:-1], strict=True))
        assert torch.equal(replayed[-1], direct[-1]), "the bias of every group, empty or not"


@pytest.mark.parametrize("name", SPECS)
def test_as_the_two_kernels_give_it(name: str) -> None:
    """Fused and unfused results agree to a step of rounding; tails that others than products read are zero."""
    t = Tensors(Case(SPECS[name], columns=320, bias=torch.bfloat16))
    spec, scales, n = t.case.spec, t.scales, t.valid
    pre, hidden = kernels.grouped_linear_activation(t.x, t.w1, t.sizes, spec, bias=t.bias, scales=scales, keep_pre=True)
    assert pre is not None
    grads = kernels.grouped_linear_activation_backward(
        t.dy, t.w2, pre, t.sizes, spec, scales=scales, want_scales=True, want_hidden=True, bias_dtype=torch.float32
    )
    assert grads.scales is not None
    assert grads.bias is not None
    apart = kernels.column_sums(grads.pre, t.sizes, torch.float32)
    torch.testing.assert_close(grads.bias, apart, rtol=1e-6, atol=1e-4)
    assert hidden[n:].eq(0).all()
    assert grads.scales[n:].eq(0).all()
    two_pre, two_hidden = torch.empty_like(pre), torch.empty_like(hidden)
    problem = GroupedGemm(Layout.NT, t.x, t.w1, t.sizes, two_hidden, bias=t.bias)
    unfused.run(hopper, replace(problem, epilogue=Activate(spec, scales, two_pre)))
    assert_near(pre[:n], two_pre[:n].double(), steps=2)
    assert_near(hidden[:n], two_hidden[:n].double(), steps=2, absolute=1e-5)
    two = ActivationGrads(*(torch.empty_like(g) for g in grads[:3] if g is not None))
    problem = GroupedGemm(Layout.NN, t.dy, t.w2, t.sizes, two.pre)
    unfused.run(hopper, replace(problem, epilogue=ActivateBackward(spec, scales, pre, two)))
    assert two.hidden is not None
    assert grads.hidden is not None
    assert_near(grads.pre[:n], two.pre[:n].double(), steps=2, absolute=1e-5)
    assert_near(grads.hidden[:n], two.hidden[:n].double(), steps=2, absolute=1e-5)
    torch.testing.assert_close(grads.scales[:n], two.scales[:n], rtol=1e-5, atol=1e-4)  # type: ignore[index]


def scattered(whole: Tensor) -> list[Tensor]:
    """The parts of a tensor as tensors of their own, at different distances."""
    copies = {g: whole[g].clone() for g in (3, 0, 5, 1, 4, 2)}
    return [copies[g] for g in range(len(whole))]


def test_weights_and_biases_anywhere_in_memory() -> None:
    t = Tensors(Case(SPECS["silu glu"], columns=320, bias=torch.bfloat16))
    assert t.bias is not None
    w1, w2, bias = scattered(t.w1), scattered(t.w2), scattered(t.bias)
    for spec in (t.case.spec, gated("silu", None, 1.0, 0.0, interleaved(8))):
        how = {"scales": t.scales, "keep_pre": True}
        one = kernels.grouped_linear_activation(t.x, t.w1, t.sizes, spec, bias=t.bias, **how)
        many = kernels.grouped_linear_activation(t.x, w1, t.sizes, spec, bias=bias, **how)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(one, many, strict=True))
        pre, wants = one[0], {"scales": t.scales, "want_scales": True, "want_hidden": True, "bias_dtype": torch.float32}
        first = kernels.grouped_linear_activation_backward(t.dy, t.w2, pre, t.sizes, spec, **wants)
        second = kernels.grouped_linear_activation_backward(t.dy, w2, pre, t.sizes, spec, **wants)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(first, second, strict=True))
        turned = [w.mT.contiguous().mT for w in w1]
        other = kernels.grouped_linear_activation(t.x, turned, t.sizes, spec, bias=bias, **how)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(one, other, strict=True))
        turned = [w.mT.contiguous().mT for w in w2]
        third = kernels.grouped_linear_activation_backward(t.dy, turned, pre, t.sizes, spec, **wants)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(first, third, strict=True))


def test_refusals_say_why() -> None:
    t = Tensors(Case(SPECS["silu glu"], columns=192))
    hidden, spec = poisoned(t, 192, dtype=torch.bfloat16), gated("silu", None, 1.0, 0.0, interleaved(24))
    problem = GroupedGemm(Layout.NT, t.x, t.w1, t.sizes, hidden)
    wide = torch.rand(t.tokens, device="cuda", dtype=torch.float64)

    def why(spec: ActivationSpec, scales: Tensor | None = None, **changes: object) -> str:
        return hopper.epilogue_refusal(replace(problem, epilogue=Activate(spec, scales, None), **changes)) or ""

    assert why(SPECS["silu glu"]) == ""
    assert "no tile for blocks of 24 columns" in why(spec)
    assert "no factor" in why(SPECS["silu glu"], row_scale=t.scales)
    assert "dense scales" in why(SPECS["silu glu"], wide)
    with pytest.raises(RuntimeError, match="tile variant 2 is not built with an activation"):
        forward(Tensors(replace(t.case, variant=2)))


def test_blocks_that_no_tile_has_run_as_two_kernels() -> None:
    spec = gated("silu", None, 1.0, 0.0, interleaved(24))
    t = Tensors(Case(spec, columns=192))
    pre, hidden = kernels.grouped_linear_activation(t.x, t.w1, t.sizes, spec, scales=t.scales, keep_pre=True)
    assert pre is not None
    expected = hidden[: t.valid].double().clone()
    assert t.scales is not None
    pointwise.forward(pre[: t.valid].double(), spec, t.scales[: t.valid].double(), expected)
    assert_near(hidden[: t.valid], expected, absolute=1e-5)
