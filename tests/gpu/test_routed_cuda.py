"""The routed experts of a layer on the kernels of the extension: the same bits however they are called."""

from __future__ import annotations

import pytest
from checks.device import needs_hopper
from checks.moe import (
    check_backward_twice,
    check_called_gives_the_bits_of_the_trained,
    check_frozen_parts_change_nothing_else,
    check_profile_names_the_call,
    check_sliced_gradients_are_the_same,
    check_tokens_that_changed_are_an_error,
)
from checks.routed import CASES

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_called_gives_the_bits_of_the_trained(name: str) -> None:
    check_called_gives_the_bits_of_the_trained("cuda", name)


@pytest.mark.parametrize("name", ["plain", "gpt-oss", "absent, transposed"])
def test_sliced_gradients_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sliced_gradients_are_the_same("cuda", name, monkeypatch)


@pytest.mark.parametrize("frozen", range(7))
def test_frozen_parts_change_nothing_else(frozen: int) -> None:
    check_frozen_parts_change_nothing_else("cuda", frozen)


def test_backward_twice() -> None:
    check_backward_twice("cuda")


def test_tokens_that_changed_are_an_error() -> None:
    check_tokens_that_changed_are_an_error("cuda")


def test_profile_names_the_call() -> None:
    check_profile_names_the_call("cuda")
