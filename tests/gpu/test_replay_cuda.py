"""Replays on the GPU: the bits of calls that know nothing of earlier ones, however many rows a step has."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from checks.device import needs_hopper
from models import mlp
from reference import unit
from torch import Tensor

from fusible import Sequential
from fusible.fuser import replay

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]

E, K, F = 5, 64, 128
ROWS = [300, 421, 512, 77, 1300, 301, 300, 1030, 1]


def step(model: Sequential, x: Tensor, sizes: Tensor, scales: Tensor, dy: Tensor, lend: bool) -> list[Tensor]:
    out, dx = torch.full_like(dy, 7), torch.full_like(x.detach(), 7)
    op_kwargs: Any = {0: {"grad_input": dx}, 3: {"output": out}} if lend else {}
    y = model(x, split_sizes=sizes, scales=scales, op_kwargs=op_kwargs)
    grads = torch.autograd.grad(y, [x, scales, *model.parameters()], dy)
    assert not lend or (y.data_ptr() == out.data_ptr() and grads[0].data_ptr() == dx.data_ptr())
    return [y, *grads]


@pytest.mark.hopper
@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_differ_in_every_step(lend: bool, single: bool, bias: bool) -> None:
    model = mlp(E, K, F, bias=bias, device="cuda", dtype=torch.bfloat16, single_grouped_weight=single)
    counts = list[int]()
    for rows in ROWS:
        x, dy = (unit(rows, K, dtype=torch.bfloat16, grad=False).cuda() for _ in range(2))
        scales = torch.rand(rows, device="cuda").requires_grad_()
        sizes = torch.tensor([rows // 3, 0, rows // 4, rows // 7, 1 if rows > 7 else 0], device="cuda")
        before = replay.stats().replayed
        got = step(model, x.requires_grad_(), sizes, scales, dy, lend)
        counts.append(replay.stats().replayed - before)
        expected = step(deepcopy(model), x, sizes, scales, dy, lend)
        assert replay.stats().replayed == before + counts[-1]

        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), rows
    assert counts[3:] == [2] * 6
    assert model.explain().replay == "replayed"
