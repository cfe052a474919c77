"""The kernel that transposes bytes, bit for bit against torch; needs the built extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from checks import transposition as checks
from checks.device import needs_hopper

from fusible import config
from fusible.ops.kernels.doors.transposition import transpose_bytes

pytestmark = [pytest.mark.cuda, needs_hopper]


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("shape", [*checks.SHAPES, (512, 136, 160), (8, 1408, 2048)], ids=str)
def test_kernel(shape: tuple[int, int, int], offset: int) -> None:
    checks.check_transpose("cuda", *shape, offset=offset)


def test_more_than_two_gigabytes() -> None:
    groups, rows, columns = 5, 28672, 16384
    data = torch.randint(0, 256, (groups, rows, columns), dtype=torch.uint8, device="cuda")
    with config(strict=True):
        out = transpose_bytes(data)

    for transposed, matrix in zip(out, data, strict=True):
        assert torch.equal(transposed, matrix.mT)
