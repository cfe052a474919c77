"""The suite under another backend than the one for which its tests were written: which of them are skipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from other_backend import of_run, reason

from fusible import GroupedLinear, Sequential, config


def kernel_of_hopper() -> None:
    words = "triton (activation in the epilogue)"
    assert "hopper (pointwise)" in words


def replayed() -> None:
    replay = "not replayed: a kernel of Triton runs"
    assert replay == "replayed"


def refused() -> None:
    with config(backend="triton"):
        Sequential(GroupedLinear(1, 8, 8, dtype=torch.float64))(
            torch.ones(2, 8, dtype=torch.float64), split_sizes=torch.tensor([2])
        )


def wrong_number() -> None:
    assert torch.ones(()) == 2


def wrong_name() -> None:
    torch.hopper()  # type: ignore[attr-defined]


def error_of(test: Callable[[], None]) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011 (of any kind)
        test()
    return raised.value


@pytest.mark.parametrize(
    ("test", "why"),
    [
        (kernel_of_hopper, 'is about our Hopper kernels: assert "hopper (pointwise)" in words'),
        (replayed, 'is about our Hopper kernels: assert replay == "replayed"'),
        (refused, "triton refuses: "),
        (wrong_number, None),
        (wrong_name, None),
    ],
)
def test_what_does_not_hold_under_triton(test: Callable[[], None], why: str | None) -> None:
    found = reason(error_of(test), "triton")

    assert found is None if why is None else found is not None and found.startswith(why)


@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_all_hold_under_ours(backend: str) -> None:
    assert reason(error_of(kernel_of_hopper), backend) is None


@pytest.mark.parametrize(("of_environment", "expected"), [(None, "auto"), ("triton", "triton"), ("loop", "auto")])
def test_tests_whose_fixture_names_a_backend_hold(
    of_environment: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSIBLE_BACKEND", raising=False)
    if of_environment is not None:
        monkeypatch.setenv("FUSIBLE_BACKEND", of_environment)
    with config(backend="triton"):
        assert of_run() == expected
