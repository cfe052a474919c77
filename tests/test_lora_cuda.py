"""Routed experts with low-rank adapters on a GPU."""

from __future__ import annotations

import pytest
import torch
from checks.lora import check_trains

from fusible.ops.kernels.hopper import gemm as hopper

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.device_refusal(torch.cuda.current_device()) is not None,
        reason="needs a Hopper GPU and the built extension",
    ),
]


@pytest.mark.parametrize("ranks", [(8, 16), (8, 0), (0, 8), (64, 8)])
def test_trains(ranks: tuple[int, int]) -> None:
    check_trains("cuda", ranks)
