"""Whatever stands in fresh memory, nothing of it reaches a result: torch fills it with NaN in these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusible
from fusible import Bias, GroupedLinear, Scale, Sequential, SwiGLU

FUSIONS = ["GroupedMLP", "GroupedLinearGLU", "GLUScale"]


@pytest.fixture
def _poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("disabled", [FUSIONS[:n] for n in range(4)], ids=len)
def test_no_result_depends_on_the_memory_of_the_tail(disabled: list[str]) -> None:
    model = Sequential(GroupedLinear(3, 8, 16), SwiGLU(), Scale(), GroupedLinear(3, 8, 8), Scale())
    x, scales = torch.randn(12, 8, requires_grad=True), torch.rand(12, requires_grad=True)
    with fusible.config(disable_fusions=disabled):
        y = model(x, split_sizes=torch.tensor([3, 4, 2]), scales=scales)
        grads = torch.autograd.grad(y, [x, scales, *model.parameters()], torch.randn(12, 8))

    assert torch.isfinite(torch.cat([t.reshape(-1) for t in (y, *grads)])).all()
    assert not grads[1][9:].any()


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])
def test_the_gradient_of_a_bias_between_linears_has_no_terms_of_the_tail(dtype: torch.dtype, stacked: bool) -> None:
    ends = (GroupedLinear(3, *sizes, single_grouped_weight=stacked) for sizes in ((8, 16), (8, 8)))
    model = Sequential(next(ends), Bias(16), SwiGLU(), next(ends)).to(dtype)
    x, dy, grads = torch.randn(12, 8, dtype=dtype), torch.randn(12, 8, dtype=dtype), []
    x[9:] = dy[9:] = torch.nan
    for disabled in ([], ["GroupedMLP", "GroupedLinearGLU", "PointwiseChain"]):
        with fusible.config(disable_fusions=disabled):
            y = model(x, split_sizes=torch.tensor([3, 4, 2]))
            grads += torch.autograd.grad(y, [model[1].bias], dy)

    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])
def test_scales_of_the_tail_reach_nothing(dtype: torch.dtype, stacked: bool) -> None:
    ends = (GroupedLinear(3, *sizes, single_grouped_weight=stacked) for sizes in ((8, 16), (8, 8)))
    model = Sequential(next(ends), SwiGLU(), next(ends), Scale()).to(dtype)
    scales = torch.rand(12).to(dtype)
    scales[9:] = torch.nan
    y = model(torch.randn(12, 8, dtype=dtype), split_sizes=torch.tensor([3, 4, 2]), scales=scales)

    assert [step.name for step in model.explain().steps] == ["GroupedMLP"]
    assert torch.isfinite(y).all()
    assert not y[9:].any()
