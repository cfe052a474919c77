"""Whatever stands in fresh memory, nothing of it reaches a result: torch fills it with NaN in these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusible
from fusible import GroupedLinear, Scale, Sequential, SwiGLU

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
