"""Why a product cannot end in an activation or its backward: what is decided without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusible.ops.kernels.hopper import epilogue
from fusible.ops.kernels.problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

T, K, F, E = 6, 16, 96, 2
SWIGLU = gated("silu", None, 1.0, 0.0, "concat")


def rows(columns, dtype=torch.bfloat16):
    return torch.zeros(T, columns, dtype=dtype)


def product(layout=Layout.NT, columns=2 * F, out=F, dtype=torch.bfloat16):
    shape = (E, columns, K) if layout is Layout.NT else (E, K, columns)
    return GroupedGemm(layout, rows(K, dtype), torch.zeros(shape, dtype=dtype), torch.tensor([2, 3]), rows(out, dtype))


def forward_refusal(problem, spec, scales, preact):
    return epilogue.refusal(replace(problem, epilogue=Activate(spec, scales, preact)))


def backward_refusal(problem, spec, scales, grads):
    return epilogue.refusal(replace(problem, epilogue=ActivateBackward(spec, scales, rows(2 * F), grads)))


def glu(block):
    return gated("silu", None, 1.0, 0.0, interleaved(block))


@pytest.mark.parametrize("spec", [SWIGLU, *map(glu, (1, 2, 4, 8, 16, 32, F)), gated("gelu", 7.0, 1.0, 1.0, "concat")])
@pytest.mark.parametrize("scales", [None, torch.float32, torch.bfloat16, torch.float16])
def test_what_an_epilogue_takes(spec, scales):
    s = None if scales is None else torch.ones(T, dtype=scales)
    assert forward_refusal(product(), spec, s, rows(2 * F)) is None
    assert forward_refusal(product(), spec, s, None) is None
    out = ActivationGrads(rows(2 * F), s, rows(F))
    assert backward_refusal(product(Layout.NN, F, 2 * F), spec, s, out) is None


def test_an_activation_without_a_gate():
    assert forward_refusal(product(columns=F), ActivationSpec("relu2"), None, rows(F)) is None


@pytest.mark.parametrize(("block", "forward", "backward"), [(3, True, True), (12, True, True), (24, True, False)])
def test_blocks_that_fit_no_tile(block, forward, backward):
    """The forward needs gate and up in one tile; the backward reads them where they are, in octets."""
    why = forward_refusal(product(), glu(block), None, None) or ""
    assert (f"has no tile for blocks of {block} columns" in why) is forward
    out = ActivationGrads(rows(2 * F), None, None)
    why = backward_refusal(product(Layout.NN, F, 2 * F), glu(block), None, out) or ""
    assert (f"has no loads for blocks of {block} columns" in why) is backward


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row_scale": torch.ones(T)}, "takes no factor but the scales of the bias"),
        ({"alpha": 2.0}, "takes no factor but the scales of the bias"),
        ({"beta": 1.0}, "takes no factor but the scales of the bias"),
    ],
)
def test_products_that_an_epilogue_does_not_take(changes, words):
    assert words in (forward_refusal(replace(product(), **changes), SWIGLU, None, None) or "")


def test_rows_and_scales_that_an_epilogue_does_not_take():
    def why(scales=None, preact=None, postact=None):
        problem = product() if postact is None else replace(product(), out=postact)
        return forward_refusal(problem, SWIGLU, scales, preact) or ""

    assert "dense scales of 16 or 32 bits" in why(scales=torch.ones(T, dtype=torch.float64))
    assert "dense scales of 16 or 32 bits" in why(scales=torch.ones(2 * T)[::2])
    assert "in the dtype of the operands" in why(preact=rows(2 * F, torch.float32))
    assert "dense and aligned" in why(preact=rows(4 * F)[:, : 2 * F])
    assert "dense and aligned" in why(postact=torch.zeros(T * F + 1, dtype=torch.bfloat16)[1:].view(T, F))


def test_weights_either_way():
    out = ActivationGrads(rows(2 * F), None, rows(F))
    for layout in (Layout.NT, Layout.NN):
        assert forward_refusal(product(layout), SWIGLU, None, None) is None
        assert backward_refusal(product(layout, F, 2 * F), SWIGLU, None, out) is None


def test_a_backward_takes_the_plain_product():
    out, spec = ActivationGrads(rows(2 * F), None, rows(F)), SWIGLU
    problem = product(Layout.NN, F, 2 * F)
    scaled = replace(problem, row_scale=torch.ones(T))
    assert "takes no factors" in (backward_refusal(scaled, spec, None, out) or "")
