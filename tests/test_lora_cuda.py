"""Routed experts with low-rank adapters on a GPU."""

from __future__ import annotations

import pytest
from checks.device import needs_hopper
from checks.lora import check_trains

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]


@pytest.mark.parametrize("ranks", [(8, 16), (8, 0), (0, 8), (64, 8)])
def test_trains(ranks: tuple[int, int]) -> None:
    check_trains("cuda", ranks)
