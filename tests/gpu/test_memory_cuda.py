"""Memory that the experts keep and use on a GPU, as counted by its allocator."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import pytest
import torch
from checks.device import needs_hopper
from models import mlp
from reference import unit
from torch import Tensor

from fusible import config
from fusible.fuser import replay

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]

E, K, F, T = 4, 512, 1024, 8192
SMALL = 1 << 20  # scales, sizes, workspaces; and what the allocator rounds up
BF16 = torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return unit(*shape, dtype=dtype, grad=False).cuda().requires_grad_(grad)


experts = partial(mlp, E, K, F, bias=False, device="cuda", dtype=BF16)


class Step:
    """A forward, and the backward of what it gave."""

    def __init__(self, **how: Any) -> None:
        self.model = experts(**how)
        self.x, self.scales = tensor(T, K), tensor(T, dtype=torch.float32)
        self.sizes = torch.full((E,), T // E, device="cuda")
        self.dy = tensor(T, K, grad=False)
        self.backward(self.forward())  # what is made once is there

    def forward(self) -> Tensor:
        y: Tensor = self.model(self.x, split_sizes=self.sizes, scales=self.scales)
        return y

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, [self.x, self.scales, *self.model.parameters()], self.dy)


class Watch:
    """Bytes above those at its making: at the most so far, and now."""

    def __init__(self) -> None:
        gc.collect()  # what earlier tests left in cycles would be freed meanwhile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated() - self.before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self.before


def test_forward_keeps_the_input_and_the_pre_activation() -> None:
    """2K + 4F bytes a row, of which the input is the caller's; and the output."""
    step, watch = Step(), Watch()

    y = step.forward()

    kept = watch.live - y.nbytes
    assert 4 * F * T <= kept <= 4 * F * T + SMALL
    assert watch.peak <= kept + y.nbytes + 2 * F * T + SMALL  # the activation, until the second linear has read it


def test_inference_keeps_nothing() -> None:
    step = Step()
    with torch.no_grad():
        watch = Watch()
        y = step.forward()

    assert watch.live <= y.nbytes + SMALL


@pytest.mark.parametrize("frozen", [0, 3])
def test_frozen_linears_keep_and_take_less(frozen: int) -> None:
    """A frozen first linear needs no input, a frozen second one no activation; neither has a weight gradient."""
    step = Step()
    step.model[frozen].requires_grad_(False)
    watch = Watch()
    y = step.forward()
    kept = watch.live - y.nbytes
    leaves = [step.x, step.scales, *(p for p in step.model.parameters() if p.requires_grad)]
    watch = Watch()
    gradients = torch.autograd.grad(y, leaves, step.dy)

    assert kept <= 4 * F * T + SMALL
    needed = 4 * F * T + (
        2 * F * T if frozen == 0 else 0
    )  # the pre-activation's gradient; the activation, for FC2's weight
    assert watch.peak <= needed + sum(g.nbytes for g in gradients) + SMALL


def test_backward_takes_its_results_and_one_activation_more() -> None:
    step = Step()
    y, watch = step.forward(), Watch()

    gradients = step.backward(y)

    results = sum(g.nbytes for g in gradients)
    assert watch.live <= results + SMALL
    assert watch.peak <= results + (4 * F + 2 * F) * T + SMALL


def test_buffers_of_the_caller_take_nothing_more() -> None:
    step = Step()
    out, dx = torch.empty(T, K, device="cuda", dtype=BF16), torch.empty(T, K, device="cuda", dtype=BF16)
    watch = Watch()

    y = step.model(step.x, step.sizes, step.scales, step.sizes, op_kwargs={0: {"grad_input": dx}, 3: {"output": out}})

    assert watch.live <= 4 * F * T + SMALL
    watch = Watch()
    step.backward(y)
    assert watch.live <= SMALL


def test_a_long_backward_frees_each_buffer_after_its_last_reader() -> None:
    """Replayed too. At its activation: the pre-activation's gradient, the hidden rows; the results come afterwards."""
    features, hidden, rows = 1024, 2048, 32768
    model = mlp(E, features, hidden, bias=False, device="cuda", dtype=BF16)
    x, scales, dy = tensor(rows, features), tensor(rows, dtype=torch.float32), tensor(rows, features, grad=False)
    sizes = torch.full((E,), rows // E, device="cuda")

    def step() -> int:
        y = model(x, split_sizes=sizes, scales=scales)
        watch = Watch()
        torch.autograd.grad(y, [x, scales, *model.parameters()], dy)
        return watch.peak

    before = replay.stats().replayed
    peaks = [step() for _ in range(4)]  # the second captures the backward, and holds what it reads

    partial_sums = scales.nbytes * hidden // 64  # of the scales' gradient: one number a row of each 64 columns
    of_weights = x.nbytes + model[0].weight.nbytes + 2 * hidden * rows  # dx, and the first weight's with its operands
    assert replay.stats().replayed - before == 4
    assert max(peaks[2:]) <= max(6 * hidden * rows + partial_sums, of_weights) + SMALL


def test_recomputing_keeps_the_input_alone() -> None:
    step = Step()
    expected = step.backward(step.forward())
    with config(recompute=True):
        step.backward(step.forward())
        watch = Watch()
        y = step.forward()
    kept = watch.live - y.nbytes
    got = step.backward(y)

    assert kept <= SMALL
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_repeated_steps_do_not_grow() -> None:
    step = Step()
    step.backward(step.forward())
    torch.cuda.synchronize()
    live, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):
        step.backward(step.forward())

    deadline = time.monotonic() + 10
    while torch.cuda.memory_allocated() > live and time.monotonic() < deadline:
        time.sleep(0.01)  # autograd's thread lets go of the last results after they have been returned
    assert torch.cuda.memory_allocated() <= live  # the first step's results may still have been live
    assert torch.cuda.memory_reserved() == reserved
