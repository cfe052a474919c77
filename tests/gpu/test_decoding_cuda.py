"""The kernel that decodes stored weights, bit for bit; needs the built extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from checks import decoding as checks
from checks.decoding import Stored
from checks.device import needs_hopper

from fusible import MXFP4, config
from fusible.ops.formats.copies import Weight
from fusible.ops.kernels.doors.decoding import decode_weight

pytestmark = [pytest.mark.cuda, needs_hopper]
each_stored = pytest.mark.parametrize("stored", checks.STORED, ids=checks.IDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*checks.SHAPES, (8, 1408, 2048)], ids=str)
@each_stored
def test_kernel(stored: Stored, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    checks.check_decode("cuda", stored, shape, dtype)


@each_stored
def test_kernel_rounds_as_pytorch(stored: Stored) -> None:
    checks.check_as_pytorch("cuda", stored, (3, 136, 384))


def test_more_than_two_gigabytes() -> None:
    groups, rows, columns = 5, 28672, 16384
    data = torch.randint(0, 256, (groups, rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(100, 140, (groups, rows, columns // 32), dtype=torch.uint8, device="cuda")
    scales = scales.view(torch.float8_e8m0fnu)
    with config(strict=True):
        out = decode_weight(data, scales, None, torch.empty(0, dtype=torch.bfloat16, device="cuda"), MXFP4())

    for group in range(groups):
        part = slice(group, group + 1)
        want = MXFP4().decoded(Weight(data[part], scales[part]), torch.bfloat16)
        assert checks.same_bits(out[part], want)
