"""The kernels that quantise and dequantise at once, bit for bit against the reference on the CPU; needs the built
extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from checks import fake_quantize as checks
from checks.device import needs_hopper
from checks.quantize import HALVES

from fusible.ops.formats.copies import PackedFormat

pytestmark = [pytest.mark.cuda, needs_hopper]
by_format = pytest.mark.parametrize("format", checks.FORMATS, ids=lambda format: format.value)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_rows_of_mxfp8(sizes, dtype):
    for features, pitch in ((16, 0), (272, 8), (2880, 0)):
        checks.check_rows("cuda", PackedFormat.MXFP8, sizes, features, dtype, pitch=pitch, finite=False)


@pytest.mark.parametrize("rounding", checks.ROUNDINGS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_rows_of_nvfp4(sizes, dtype, rounding):
    for features, pitch in ((16, 0), (144, 8), (2048, 0)):
        checks.check_rows("cuda", PackedFormat.NVFP4, sizes, features, dtype, pitch=pitch, **rounding)
    checks.check_rows("cuda", PackedFormat.NVFP4, sizes, 80, dtype, finite=False, **rounding)


@by_format
@pytest.mark.parametrize("want", ["rows", "columns"])
def test_one_copy(format, want):
    checks.check_rows("cuda", format, checks.SIZES[0], 400, want=want, index=torch.int32)
    checks.check_gathered_rows("cuda", format, 500, 4, 528, want)


@by_format
def test_many_groups(format):
    checks.check_rows("cuda", format, [g * 7 % 50 for g in range(300)], 144, tail=129)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_amax(dtype):
    checks.check_every_amax("cuda", PackedFormat.MXFP8, dtype, slice(None))
    checks.check_every_amax("cuda", PackedFormat.NVFP4, dtype, slice(None, None, 4))


@by_format
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_weight(format, dtype):
    for asked in checks.WEIGHTS:
        checks.check_weight("cuda", format, dtype=dtype, **asked)
        checks.check_weight("cuda", format, dtype=dtype, finite=False, **asked)
