"""A backward of fused experts that takes the device longer than the host is launched kernel by kernel."""

from __future__ import annotations

import pytest
import torch
from models import mlp

from fusible.benchmarks.stub_extension import launching_nothing
from fusible.fuser import replay
from fusible.ops.fused import grouped_mlp

E, K, F, ROWS = 4, 16, 8, 40
OPERATIONS = 4 * ROWS * (K * 2 * F + F * K)
REASON = "GroupedMLP.bwd: memory is let go of between the launches of a long backward"


@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_backward_is_not_replayed(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mlp, "REPLAYED_UP_TO", OPERATIONS - is_long)
    model = mlp(E, K, F, bias=False, dtype=torch.bfloat16)
    x, scales = torch.randn(ROWS, K, dtype=torch.bfloat16).requires_grad_(), torch.rand(ROWS).requires_grad_()
    sizes, dy, before = torch.full((E,), ROWS // E), torch.ones_like(x).detach(), replay.stats()
    with launching_nothing():
        for _ in range(6):
            model(x, split_sizes=sizes, scales=scales).backward(dy)
    after = replay.stats()

    assert (after.unsupported[REASON] > before.unsupported[REASON]) == is_long
    assert after.replayed - before.replayed == (4 if is_long else 8)  # forwards, and backwards
