"""Products that do not need one another overlap where they are launched one directly behind the other."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import independent as checks
from emulation import build, harness
from models import mlp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusible import GroupedLinear, Sequential
from fusible.fuser import replay
from fusible.fuser.replay import capture
from fusible.ops import kernels
from fusible.ops.kernels import Independent, Layout

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]

RAGGED = (131, 0, 77, 1, 64)
Counted = Callable[[], int]


@pytest.fixture
def beside(emulation: harness.Emulation) -> Counted:
    """How many kernels have gone on beside the one before them, since this was asked last."""
    before = [emulation.kernels_beside()]

    def count() -> int:
        now = emulation.kernels_beside()
        before.append(now)
        return now - before[-2]

    return count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_products_have_the_bits_of_launches_that_wait(dtype: torch.dtype, wide: bool, beside: Counted) -> None:
    checks.check_products("cpu", RAGGED, 136, 264, dtype=dtype, wide=wide)
    assert beside() == 4  # weight gradients, those that are added to as well


def experts(**options: Any) -> Sequential:
    return mlp(len(RAGGED), 136, 72, dtype=torch.bfloat16, **{"bias": False, **options})


@pytest.mark.parametrize(
    ("model", "overlapping"),
    [
        (lambda: experts(), 2),
        (lambda: experts(transposed_weight=True), 2),
        (lambda: checks.with_main_grad(experts()), 2),
        (lambda: experts(bias=True), 2),
        (lambda: Sequential(GroupedLinear(len(RAGGED), 136, 72, bias=False, dtype=torch.bfloat16)), 1),
    ],
    ids=["plain", "transposed", "main_grad", "bias", "linear"],
)
@pytest.mark.parametrize(("replayed", "large"), [(False, 1), (True, 1), (True, 2**30)])
def test_the_backward_of_experts_overlaps(
    model: Callable[[], Sequential],
    overlapping: int,
    replayed: bool,
    large: int,
    beside: Counted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it in replays that hold their memory. Else the last waits if the memory of the one before becomes its."""
    monkeypatch.setattr(capture, "LARGE", large)
    made, count = model(), 5
    before = replay.stats().replayed
    with replay.simulated("cpu" if replayed else "none"):
        if overlapping == 2:
            checks.check_experts(made, "cpu", RAGGED, 136, count)
        else:
            check_linear(made, count)
    assert (replay.stats().replayed > before) == replayed
    waited = overlapping * count - beside()
    assert 0 <= waited <= (overlapping - 1) * (2 if replayed and large > 1 else count)


def check_linear(model: Sequential, count: int) -> None:
    rows, sizes = torch.randn(sum(RAGGED), 136, dtype=torch.bfloat16), torch.tensor(RAGGED)

    def call() -> Tensor:
        x = rows.clone().requires_grad_()
        model(x, split_sizes=sizes).sum().backward()
        assert x.grad is not None
        return x.grad

    with checks.apart():
        want = checks.steps(model, call, 1)[0]
    for got in checks.steps(model, call, count):
        checks.assert_same(got, want)


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, x, the weight, the sizes."""
    tokens = sum(RAGGED)
    dy, x = (torch.randn(tokens, n, dtype=torch.bfloat16) for n in (72, 136))
    return dy, x, torch.randn(len(RAGGED), 72, 136, dtype=torch.bfloat16), torch.tensor(RAGGED)


def test_a_product_waits_for_what_it_reads(beside: Counted) -> None:
    dy, _, weight, sizes = operands()
    both = Independent(2)
    dx = kernels.grouped_gemm(Layout.NN, dy, weight, sizes, independent=both)
    assert isinstance(dx, Tensor)
    dw = kernels.grouped_gemm(Layout.TN, dy, dx, sizes, independent=both)
    assert beside() == 0
    checks.assert_same([dw], [kernels.grouped_gemm(Layout.TN, dy, dx, sizes)])  # type: ignore[list-item]


def test_a_product_waits_for_readers_of_what_it_overwrites(beside: Counted) -> None:
    """Memory that became free, and was handed out again: also of a product that the one before overlapped."""
    dy, x, weight, sizes = operands()
    memory = torch.empty(len(RAGGED) * 136 * 136, dtype=torch.bfloat16)
    left = memory[: dy.numel()].view_as(dy).copy_(dy)
    three = Independent(3)
    dx = kernels.grouped_gemm(Layout.NN, left, weight, sizes, independent=three)
    dw = kernels.grouped_gemm(Layout.TN, x, dy, sizes, independent=three)
    assert beside() == 1
    del dx, dw  # kept so far: the second product would have waited if it had been given the first one's result to write
    out = memory.view(len(RAGGED), 136, 136)
    kernels.grouped_gemm(Layout.TN, x, x, sizes, out=out, independent=three)
    assert beside() == 0


def test_sums_into_one_gradient_wait_for_one_another(beside: Counted) -> None:
    dy, x, weight, sizes = operands()
    out, both = torch.zeros_like(weight, dtype=torch.float32), Independent(2)
    kernels.grouped_gemm(Layout.TN, dy, x, sizes, out=out, terms=kernels.ADDED, independent=both)
    kernels.grouped_gemm(Layout.TN, dy, x, sizes, out=out, terms=kernels.ADDED, independent=both)
    assert beside() == 0


def test_a_product_waits_where_another_kernel_came_between(beside: Counted) -> None:
    dy, x, weight, sizes = operands()
    both = Independent(2)
    kernels.grouped_gemm(Layout.NN, dy, weight, sizes, independent=both)
    kernels.column_sums(dy, sizes, torch.bfloat16)
    kernels.grouped_gemm(Layout.TN, dy, x, sizes, independent=both)
    assert beside() == 0


def test_a_product_whose_matrices_lie_anywhere_waits(beside: Counted) -> None:
    """A kernel brings their addresses, for which it waits."""
    dy, x, weight, sizes = operands()
    apart = [torch.empty(72 + 8 * i, 136, dtype=torch.bfloat16)[:72] for i in (3, 1, 2, 5, 4)]
    both = Independent(2)
    kernels.grouped_gemm(Layout.NN, dy, weight, sizes, independent=both)
    kernels.grouped_gemm(Layout.TN, dy, x, sizes, out=apart, independent=both)
    assert beside() == 0
    want = kernels.grouped_gemm(Layout.TN, dy, x, sizes)
    checks.assert_same([*apart], [*want])


def test_more_products_than_were_counted_go_their_own_way(beside: Counted) -> None:
    dy, x, weight, sizes = operands()
    both, results = Independent(2), []  # kept: a product waits where it is given memory that the one before it writes
    for _ in range(2):
        results.append(kernels.grouped_gemm(Layout.NN, dy, weight, sizes, independent=both))
        results.append(kernels.grouped_gemm(Layout.TN, dy, x, sizes, independent=both))
    assert beside() == 1


class Observing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_nothing_overlaps_where_an_allocation_may_run_something() -> None:
    assert Independent.of(1) is None
    assert Independent.of(2) is not None
    with Observing():
        assert Independent.of(2) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert Independent.of(2) is None
    finally:
        torch.use_deterministic_algorithms(False)


KERNELS = """
#include "device/ptx/ptx.cuh"

namespace ptx = fusible::ptx;

// What a kernel does, one letter after the other: it waits, goes on beside the one before, or lets the next one begin.
extern "C" const char* launched(const char* const* kernels, int count) {
  static std::string fault;
  try {
    for (int i = 0; i < count; ++i) {
      const std::string steps = kernels[i];
      emulation::Config config{dim3(1), dim3(32)};
      config.overlapped = true;
      emulation::launch(config, [&] {
        for (const char step : steps) {
          if (step == 'w') ptx::wait_for_earlier_kernels();
          if (step == '1' && emulation::current->number == 0) ptx::wait_for_earlier_kernels();
          if (step == 'b') ptx::begin_beside_earlier_kernel();
          if (step == 'l') ptx::let_next_kernel_begin();
        }
      });
    }
  } catch (const std::exception& error) {
    fault = error.what();
    return fault.c_str();
  }
  return "";
}
"""


@pytest.mark.parametrize(
    ("launches", "fault"),
    [
        (("wl", "bl1", "b1", "w"), ""),
        (("wl", "b"), "a block ends without having waited for earlier kernels"),
        (("wl", "l"), "a thread ends without having waited for earlier kernels"),
        (("lw", "b1"), "begins beside a kernel that may not have waited for those before it"),
        (("lw", "wl", "b1"), ""),
    ],
)
def test_the_emulation_reports_kernels_that_do_not_wait(
    emulation: harness.Emulation, launches: tuple[str, ...], fault: str
) -> None:
    launched = emulation.library(KERNELS).launched
    launched.restype = ctypes.c_char_p
    texts = (ctypes.c_char_p * len(launches))(*map(str.encode, launches))

    found = launched(texts, len(launches)).decode()
    assert found.endswith(fault)
    assert bool(found) == bool(fault)
