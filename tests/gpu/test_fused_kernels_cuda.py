"""The grouped GEMMs that end in an activation or its backward, against float64; needs the built extension and its GPU.

Everything that must not be read is NaN, and everything that must not be written is checked: rows of no group, and the
rows before and after each output.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from checks.device import skip_module_without_hopper
from checks.fused import (
    SOME,
    SPECS,
    Case,
    Tensors,
    assert_near,
    backward,
    check_backward,
    check_forward,
    check_nan_of_a_group_stays_in_it,
    check_nothing,
    check_the_bias_changes_nothing_else,
    check_weights_and_biases_anywhere_in_memory,
    fits,
    forward,
    poisoned,
)
from torch import Tensor

from fusible.ops import kernels
from fusible.ops.kernels import products
from fusible.ops.kernels.hopper import epilogue
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.operators.outputs import WantedThrough
from fusible.ops.kernels.problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout
from fusible.ops.kernels.pytorch import activation as pointwise
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

pytestmark = pytest.mark.cuda
skip_module_without_hopper()

from fusible.ops import _C  # noqa: E402

FORWARD, BACKWARD = [-1, *_C.ACTIVATION_VARIANTS], [-1, *_C.BACKWARD_VARIANTS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_activation(name: str, dtype: torch.dtype) -> None:
    case = Case(SPECS[name], dtype=dtype)
    for variant in FORWARD:
        check_forward("cuda", replace(case, variant=variant))
        check_forward("cuda", replace(case, variant=variant, bias=torch.float32, bias_scale=True, columns=320))
    for variant in BACKWARD:
        check_backward("cuda", replace(case, variant=variant))
        check_backward("cuda", replace(case, variant=variant, columns=320))


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


@pytest.mark.parametrize("name", SOME)
def test_shapes(name: str) -> None:
    """Depth and width that no tile divides."""
    for features, columns in SHAPES:
        case = Case(SPECS[name], features=features, columns=columns)
        for variant in FORWARD:
            check_forward("cuda", replace(case, variant=variant))
        for variant in BACKWARD:
            check_backward("cuda", replace(case, variant=variant))


def test_blocks_as_wide_as_a_tile() -> None:
    for block, columns in [(128, 384), (128, 640), (16, 48)]:
        spec = gated("silu", None, 1.0, 0.0, interleaved(block))
        case = Case(spec, columns=columns, tail=0)
        for variant in _C.ACTIVATION_VARIANTS:
            with nullcontext() if fits(spec, variant) else pytest.raises(RuntimeError, match="do not fit into a tile"):
                check_forward("cuda", replace(case, variant=variant))
        for variant in _C.BACKWARD_VARIANTS:
            check_backward("cuda", replace(case, variant=variant))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["silu glu", "gpt-oss", "blocks of 8", "blocks of 64", "relu2"])
def test_weights_stored_transposed(name: str, dtype: torch.dtype) -> None:
    case = Case(SPECS[name], dtype=dtype, transposed=True)
    for features, columns in [(136, 192), (72, 320), (8, 64), (520, 832)]:
        for variant in FORWARD:
            check_forward("cuda", replace(case, variant=variant, features=features, columns=columns))
        for variant in BACKWARD:
            check_backward("cuda", replace(case, variant=variant, features=features, columns=columns))
    for variant in FORWARD:
        check_forward("cuda", replace(case, variant=variant, bias=torch.float32, bias_scale=True, columns=320))


@pytest.mark.parametrize("name", SOME)
def test_one_group_of_every_size(name: str) -> None:
    for size in (1, 2, *range(17, 114, 16), 63, 64, 127, 128, 129, 192, 255, 256, 257, 385, 1000):
        case = Case(SPECS[name], (size,), tail=size % 5, features=72, columns=136)
        for variant in FORWARD:
            check_forward("cuda", replace(case, variant=variant))
        for variant in BACKWARD:
            check_backward("cuda", replace(case, variant=variant))


@pytest.mark.parametrize("experts", [3, 8, 65, 128, 512])
def test_many_groups(experts: int) -> None:
    torch.manual_seed(experts)
    for most in (2, 150):
        sizes = tuple(torch.randint(0, most, (experts,)).tolist())
        case = Case(SPECS["silu glu"], sizes, features=72, columns=136, tail=11, index=torch.int32)
        for variant in _C.ACTIVATION_VARIANTS:
            check_forward("cuda", replace(case, variant=variant, bias=torch.bfloat16))
        for variant in _C.BACKWARD_VARIANTS:
            check_backward("cuda", replace(case, variant=variant))


@pytest.mark.parametrize("name", ["silu glu", "gpt-oss", "gelu"])
@pytest.mark.parametrize("scales", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bias_and_scales(name: str, scales: torch.dtype | None, bias: torch.dtype | None) -> None:
    for dtype, bias_scale in [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)]:
        check_forward("cuda", Case(SPECS[name], dtype=dtype, scales=scales, bias=bias, bias_scale=bias_scale))


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("want_scales", [False, True])
@pytest.mark.parametrize("want_postact", [False, True])
@pytest.mark.parametrize("scales", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_that_are_wanted(
    scales: torch.dtype | None, want_postact: bool, want_scales: bool, bias: torch.dtype | None
) -> None:
    for name in SOME:
        for variant in BACKWARD:
            case = Case(SPECS[name], scales=scales, variant=variant)
            check_backward("cuda", case, want_postact=want_postact, want_scales=want_scales, bias_dtype=bias)


@pytest.mark.parametrize("name", SOME)
def test_the_bias_changes_nothing_else(name: str) -> None:
    check_the_bias_changes_nothing_else("cuda", name)


def test_nothing() -> None:
    check_nothing("cuda")


def test_nan_of_a_group_stays_in_it() -> None:
    check_nan_of_a_group_stays_in_it("cuda")


@pytest.mark.parametrize("name", SOME)
def test_repeats_are_bitwise_equal(name: str) -> None:
    case = Case(SPECS[name], (700, 0, 1301, 5), features=520, columns=776)
    for variant in BACKWARD:
        t = Tensors("cuda", replace(case, variant=variant))
        preact = t.rows(case.width)
        first = backward(t, preact)
        for _ in range(5):
            again = backward(t, preact)
            assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(first[:3], again[:3], strict=True))
            assert torch.equal(first.bias, again.bias)
    for variant in FORWARD:
        t = Tensors("cuda", replace(case, variant=variant))
        once = forward(t)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(once, forward(t), strict=True))


def test_graph_replay_with_other_sizes() -> None:
    t = Tensors("cuda", Case(SPECS["silu glu"], (100, 0, 200, 3, 1, 60), tail=0, columns=520))
    preact = t.rows(t.case.width)
    forward(t), backward(t, preact)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = (*forward(t), *backward(t, preact)[:4])
    for sizes in [(0, 131, 1, 0, 200, 5), (0, 0, 0, 0, 0, 0), (0, 0, 364, 0, 0, 0), (60, 60, 61, 61, 61, 61)]:
        t.sizes.copy_(torch.tensor(sizes))
        graph.replay()
        direct, n = (*forward(t), *backward(t, preact)[:4]), sum(sizes)
        assert all(torch.equal(a[:n], b[:n]) for a, b in zip(replayed[:-1], direct[:-1], strict=True))
        assert torch.equal(replayed[-1], direct[-1]), "the bias of every group, empty or not"


@pytest.mark.parametrize("name", SPECS)
def test_as_the_two_kernels_give_it(name: str) -> None:
    """Fused and unfused results agree to a step of rounding; tails that others than products read are zero."""
    t = Tensors("cuda", Case(SPECS[name], columns=320, bias=torch.bfloat16))
    spec, scales, n = t.case.spec, t.scales, t.valid
    preact, postact = kernels.grouped_linear_activation(
        *(t.x, t.w1, t.sizes, spec, kernels.Terms(bias=t.bias), kernels.ActivationCall(scales, keep_preact=True))
    )
    assert preact is not None
    grads = kernels.grouped_linear_activation_backward(
        *(t.dy, t.w2, preact, t.sizes, spec), scales=scales, wanted=WantedThrough(True, True, bias_dtype=torch.float32)
    )
    assert grads.scales is not None
    assert grads.bias is not None
    apart = kernels.column_sums(grads.preact, t.sizes, torch.float32)
    torch.testing.assert_close(grads.bias, apart, rtol=1e-6, atol=1e-4)
    assert postact[n:].eq(0).all()
    assert grads.scales[n:].eq(0).all()
    two_preact, two_postact = torch.empty_like(preact), torch.empty_like(postact)
    problem = GroupedGemm(Layout.NT, t.x, t.w1, t.sizes, two_postact, bias=t.bias)
    products.run_apart(hopper.run, replace(problem, epilogue=Activate(spec, scales, two_preact)))
    assert_near(preact[:n], two_preact[:n].double(), steps=2)
    assert_near(postact[:n], two_postact[:n].double(), steps=2, absolute=1e-5)
    two = ActivationGrads(*(torch.empty_like(g) for g in grads[:3] if g is not None))
    problem = GroupedGemm(Layout.NN, t.dy, t.w2, t.sizes, two.preact)
    products.run_apart(hopper.run, replace(problem, epilogue=ActivateBackward(spec, scales, preact, two)))
    assert two.postact is not None
    assert grads.postact is not None
    assert_near(grads.preact[:n], two.preact[:n].double(), steps=2, absolute=1e-5)
    assert_near(grads.postact[:n], two.postact[:n].double(), steps=2, absolute=1e-5)
    torch.testing.assert_close(grads.scales[:n], two.scales[:n], rtol=1e-5, atol=1e-4)  # type: ignore[index]


@pytest.mark.hopper
def test_weights_and_biases_anywhere_in_memory() -> None:
    check_weights_and_biases_anywhere_in_memory("cuda")


def test_refusals_say_why() -> None:
    t = Tensors("cuda", Case(SPECS["silu glu"], columns=192))
    postact, spec = poisoned(t, 192, dtype=torch.bfloat16), gated("silu", None, 1.0, 0.0, interleaved(24))
    problem = GroupedGemm(Layout.NT, t.x, t.w1, t.sizes, postact)
    wide = torch.rand(t.tokens, device="cuda", dtype=torch.float64)

    def why(spec: ActivationSpec, scales: Tensor | None = None, **changes: object) -> str:
        return epilogue.refusal(replace(problem, epilogue=Activate(spec, scales, None), **changes)) or ""

    assert why(SPECS["silu glu"]) == ""
    assert "no tile for blocks of 24 columns" in why(spec)
    assert "no factor" in why(SPECS["silu glu"], row_scale=t.scales)
    assert "dense scales" in why(SPECS["silu glu"], wide)
    with pytest.raises(RuntimeError, match="tile variant 2 is not built with this activation"):
        forward(Tensors("cuda", replace(t.case, variant=2)))


def test_blocks_that_no_tile_has_run_as_two_kernels() -> None:
    spec = gated("silu", None, 1.0, 0.0, interleaved(24))
    t = Tensors("cuda", Case(spec, columns=192))
    call = kernels.ActivationCall(t.scales, keep_preact=True)
    preact, postact = kernels.grouped_linear_activation(t.x, t.w1, t.sizes, spec, kernels.NO_TERMS, call)
    assert preact is not None
    expected = postact[: t.valid].double().clone()
    assert t.scales is not None
    pointwise.forward(preact[: t.valid].double(), spec, t.scales[: t.valid].double(), expected)
    assert_near(postact[: t.valid], expected, absolute=1e-5)
