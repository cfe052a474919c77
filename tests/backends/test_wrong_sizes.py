"""Kernels report split sizes that do not fit, on the emulated device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import wrong_sizes
from checks.wrong_sizes import CASES, ROWS, Product, fits, raised
from emulation import build, harness

import fusible
from fusible.fuser.contract.torch_private import address_function
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.kernels.pytorch import wrong_sizes as pytorch_reports

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]

LAYOUTS = list(Layout)


@pytest.fixture(autouse=True)
def _no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong sizes of an earlier test are none of these."""
    monkeypatch.setattr(pytorch_reports, "_reports", {})


@pytest.mark.parametrize(("sizes", "group", "size", "why"), CASES)
def test_what_is_reported(sizes: list[int], group: int, size: int, why: str) -> None:
    wrong_sizes.check_report("cpu", Layout.NT, torch.int32, sizes, group, size, why)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reports(layout: Layout, index: torch.dtype) -> None:
    for case in CASES[:2]:
        wrong_sizes.check_report("cpu", layout, index, *case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_fit_report_nothing(layout: Layout) -> None:
    wrong_sizes.check_sizes_that_fit_report_nothing("cpu", layout)


def test_the_next_launch_raises() -> None:
    wrong_sizes.check_the_next_launch_raises("cpu")


def test_a_report_is_raised_once() -> None:
    wrong_sizes.check_a_report_is_raised_once("cpu")


def test_a_huge_size() -> None:
    wrong_sizes.check_a_huge_size("cpu")


@pytest.mark.parametrize(("sizes", "group", "size", "why"), CASES)
def test_zeroed_tails(sizes: list[int], group: int, size: int, why: str) -> None:
    wrong_sizes.check_zeroed_tails("cpu", sizes, group, size, why)


@pytest.mark.parametrize(("dims", "message"), wrong_sizes.DIMS)
def test_dims(dims: list[int], message: str) -> None:
    wrong_sizes.check_dims("cpu", dims, message)


def test_captured_launches(emulation: harness.Emulation) -> None:
    """A replay reports, and the next one raises before it launches anything."""
    sizes, *wrong = CASES[0]
    product, given = Product("cpu", Layout.NT, len(sizes)), torch.tensor(fits(sizes), dtype=torch.int32)
    tensors = [product.a, product.b, product.out, given]
    with emulation.Capture([(t.data_ptr(), t.nbytes) for t in tensors], wrong_sizes.ROWS) as capture:
        product.launch(given)
    assert capture.refusal is None
    replay = capture.launches(capture, 2**20)

    def run() -> None:
        replay.run(tensors, [], address_function, wrong_sizes.ROWS, 0)

    given.copy_(torch.tensor(sizes))
    run()
    product.out.zero_()
    with raised(*wrong):
        run()
    assert not product.out.any()
    given.copy_(torch.tensor(fits(sizes)))
    run()
    assert product.out.any()
    fusible.check_device_errors(0)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("sizes", "group", "size", "why"), CASES)
def test_pytorch_reports_as_kernels_do(index: torch.dtype, sizes: list[int], group: int, size: int, why: str) -> None:
    pytorch_reports.look_at(torch.tensor(sizes, dtype=index), ROWS)
    with raised(group, size, why):
        pytorch_reports.look_at(torch.tensor(fits(sizes)), ROWS)
    pytorch_reports.raise_reported(torch.device("cpu"))


def text_of(wrong: Callable[[], None]) -> str:
    with pytest.raises(RuntimeError) as caught:
        wrong()
    return str(caught.value)


@pytest.mark.parametrize("sizes", [CASES[0][0], CASES[1][0]])
def test_pytorch_says_it_in_the_words_of_the_extension(sizes: list[int]) -> None:
    Product("cpu", Layout.NT, len(sizes))(sizes)
    pytorch_reports.look_at(torch.tensor(sizes), ROWS)

    by_kernels = text_of(lambda: fusible.check_device_errors(0))
    assert text_of(lambda: pytorch_reports.raise_reported(torch.device("cpu"))) == by_kernels


def test_pytorch_keeps_the_first_report() -> None:
    report = pytorch_reports._reports[torch.device("cpu")] = pytorch_reports.SizeReport(torch.device("cpu"))
    for sizes, *_ in CASES[:2]:
        report.look_at(torch.tensor(sizes), ROWS)
    with raised(*CASES[0][1:]):
        pytorch_reports.raise_reported(torch.device("cpu"))


def test_pytorch_looks_again_at_sizes_that_were_changed_in_place() -> None:
    sizes = torch.tensor([16, 16])
    pytorch_reports.look_at(sizes, ROWS)
    pytorch_reports.look_at(sizes, ROWS)
    sizes[1] = 100
    pytorch_reports.look_at(sizes, ROWS)
    with raised(1, 100, wrong_sizes.TOO_MANY):
        pytorch_reports.raise_reported(torch.device("cpu"))
