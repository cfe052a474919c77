"""Split sizes that do not fit: what kernels report of them, and when the host raises it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import fusible
from fusible import GroupedTensor
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.hopper import ragged, rows
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.kernels.problems.ragged import RaggedGemm

from .device import synchronize

NEGATIVE, TOO_MANY = "which is negative", "more than the rows that the groups before it leave"
ROWS, K, N = 64, 16, 24
CASES = [
    ([-3, 16, 16, 16], 0, -3, NEGATIVE),
    ([100, 16, 16, 16], 0, 100, TOO_MANY),
    ([16, 16, 32, 1], 3, 1, TOO_MANY),
    ([16, 16, -1, 99], 2, -1, NEGATIVE),
    ([0] * 40 + [60, 5, 5], 41, 5, TOO_MANY),
    ([0] * 31 + [60, -7, 50], 32, -7, NEGATIVE),
]
"""Split sizes of 64 rows, the first group that does not fit, its size, and what is wrong with it."""

DIMS = [
    ([3, -2, 5], "first_dims or last_dims on the device of an earlier call were wrong: a dim of group 1 is -2, which"),
    ([3, 60, 5], "the matrix of group 2 ends at element 1088, and there are fewer"),
]
"""Rows of matrices, 64 in all, and what is said of them."""


@contextmanager
def raised(group: int, size: int, why: str) -> Iterator[None]:
    """In the body, the host raises what has been reported."""
    words = f"split_sizes on the device of an earlier call were wrong: the size of group {group} is {size}, {why}"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        yield


class Product:
    """A product of 64 rows in as many groups as there are sizes."""

    def __init__(self, device: str, layout: Layout, groups: int) -> None:
        shapes = {Layout.NT: (groups, N, K), Layout.NN: (groups, K, N), Layout.TN: (ROWS, N)}
        out = (groups, K, N) if layout is Layout.TN else (ROWS, N)
        self.device, self.layout = device, layout
        self.a, self.b = (torch.ones(s, device=device, dtype=torch.bfloat16) for s in ((ROWS, K), shapes[layout]))
        self.out = torch.zeros(out, device=device, dtype=torch.bfloat16)

    def launch(self, sizes: torch.Tensor) -> None:
        """With tasks in a fixed order, which need no workspace."""
        hopper.launch(self.layout, self.a, self.b, self.out, sizes, dynamic=False)

    def __call__(self, sizes: list[int], index: torch.dtype = torch.int32) -> None:
        """Launches, and waits."""
        self.launch(torch.tensor(sizes, device=self.device, dtype=index))
        synchronize(self.device)


def fits(sizes: list[int]) -> list[int]:
    """Sizes of as many groups that fit, with a tail."""
    return [1] * len(sizes)


def check_report(device: str, layout: Layout, index: torch.dtype, sizes: list[int], *wrong: object) -> None:
    """It is raised once, by what asks for it first."""
    product = Product(device, layout, len(sizes))
    product(sizes, index)
    with raised(*wrong):
        fusible.check_device_errors(0)
    fusible.check_device_errors(0)
    product(fits(sizes), index)


def check_the_next_launch_raises(device: str) -> None:
    """It raises before it writes; the one after it runs."""
    sizes, *wrong = CASES[0]
    product = Product(device, Layout.NT, len(sizes))
    product(sizes)
    product.out.zero_()
    with raised(*wrong):
        product(fits(sizes))
    synchronize(device)
    assert not product.out.any()
    product(fits(sizes))
    assert product.out[: len(sizes)].eq(K).all()


def check_a_report_is_raised_once(device: str) -> None:
    """A raised report is cleared, and the next one is new."""
    product = Product(device, Layout.NT, 4)
    for sizes, *wrong in CASES[:3]:
        product(sizes)
        with raised(*wrong):
            product(CASES[3][0])
        fusible.check_device_errors(0)


def check_sizes_that_fit_report_nothing(device: str, layout: Layout) -> None:
    product = Product(device, layout, 4)
    for sizes in ([16, 16, 16, 16], [0, 0, 0, 64], [1, 2, 3, 4], [0, 0, 0, 0]):
        product(sizes)
        fusible.check_device_errors(0)


def check_a_huge_size(device: str) -> None:
    """The report has 48 bits for it."""
    Product(device, Layout.NT, 2)([1, 1 << 60], torch.int64)
    with raised(1, (1 << 47) - 1, TOO_MANY):
        fusible.check_device_errors(0)


def check_zeroed_tails(device: str, sizes: list[int], *wrong: object) -> None:
    """Backends that know of no reports have their tails zeroed by a kernel that does."""
    rows.zero_tail(torch.ones(ROWS, N, device=device), torch.tensor(sizes, device=device))
    synchronize(device)
    with raised(*wrong):
        fusible.check_device_errors(0)


def check_dims(device: str, dims: list[int], message: str) -> None:
    """Checks matrices with their own shapes: ``dims`` are the rows of each, 64 in total."""
    groups, options = len(dims), {"device": device, "dtype": torch.bfloat16}
    first_dims = torch.zeros(groups, device=device, dtype=torch.int64)
    a, out = (GroupedTensor(torch.ones(ROWS, columns, **options), first_dims) for columns in (K, N))
    first_dims.copy_(torch.tensor(dims))
    ragged.run(RaggedGemm(Layout.NT, a, GroupedTensor(torch.ones(groups, N, K, **options)), out, None, None, None))
    synchronize(device)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fusible.check_device_errors(0)
