"""Products of few rows inside a CUDA graph: those of the loop, which a graph cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusible.ops.kernels.problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout, first
from fusible.ops.kernels.pytorch import captured_rows, loop, wrong_sizes
from fusible.ops.values.activation_spec import gated

E, K, N, SIZES, TAIL = 4, 8, 12, (3, 0, 5, 2), 3
T = sum(SIZES) + TAIL
SPEC = gated("silu", None, 1.0, 0.0, "concat")


def problem(layout: Layout, separate: bool = False, **how: Any) -> GroupedGemm:
    torch.manual_seed(0)
    a, b = torch.randn(T, K), torch.randn(E, *((N, K) if layout is Layout.NT else (K, N)))
    return GroupedGemm(layout, a, list(b) if separate else b, torch.tensor(SIZES), torch.full((T, N), 7.0), **how)


def check(p: GroupedGemm) -> None:
    expected = replace(p, out=first(p.out).clone())
    captured_rows.run(p)
    loop.run(expected)
    valid = sum(SIZES)
    torch.testing.assert_close(first(p.out)[:valid], first(expected.out)[:valid])


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("layout", [Layout.NT, Layout.NN])
def test_products(layout: Layout, separate: bool) -> None:
    torch.manual_seed(1)
    bias, scale = torch.randn(E, N), torch.rand(T)
    for how in ({}, {"alpha": torch.rand(E), "beta": 0.5}, {"bias": bias, "bias_scale": scale}, {"row_scale": scale}):
        p = problem(layout, separate, **how)
        check(p)
        assert first(p.out)[sum(SIZES) :].eq(7).all()


@pytest.mark.parametrize("keeps", [False, True])
def test_activations(keeps: bool) -> None:
    preact = torch.zeros(T, N) if keeps else None
    p = problem(Layout.NT, bias=torch.randn(E, N))
    check(replace(p, out=torch.empty(T, N // 2), epilogue=Activate(SPEC, torch.rand(T), preact)))
    assert preact is None or preact[0].ne(0).all()


def test_sizes_that_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrong_sizes, "_reports", {})  # the report is for a later call, which is another test's
    p = problem(Layout.NT)
    p.split_sizes = torch.tensor([-3, 5, 2**40, 1])
    check(p)
    assert first(p.out)[:5].ne(7).all()


def test_what_a_graph_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(Layout.NT)
    many, wgrad = replace(p, a=torch.randn(17, K)), replace(p, layout=Layout.TN, b=p.a)
    grads = ActivationGrads(torch.empty(T, 2 * N), None, None)
    backward = replace(p, epilogue=ActivateBackward(SPEC, None, torch.empty(T, 2 * N), grads))
    assert all(loop.refusal(each) is None for each in (p, many, wgrad, backward))
    monkeypatch.setattr(loop, "is_capturing", lambda device: True)
    assert loop.refusal(p) is None
    for each in (many, wgrad, backward):
        assert "which a CUDA graph cannot, except in a forward of at most 16 rows" in str(loop.refusal(each))
