"""Products of packed weights against float64; needs an H100 or H200 and the built extension."""

from __future__ import annotations

import pytest
import torch
from checks import packed
from checks.device import skip_module_without_hopper
from checks.packed import Case
from checks.recipes import Kernels

import fusible
from fusible.ops.formats.copies import PackedFormat

pytestmark = pytest.mark.cuda
skip_module_without_hopper()
each_format = pytest.mark.parametrize("format", PackedFormat, ids=lambda format: format.value)


@each_format
def test_groups_of_any_sizes(format: PackedFormat) -> None:
    for n, k in [(8, 32), (72, 96), (1536, 2048), (200, 2880)]:
        packed.check("cuda", Case(format, n=n, k=k))
        packed.check("cuda", Case(format, sizes=(1,) * 70, n=n, k=k, tail=0))
    packed.check("cuda", Case(format, sizes=(0, 65, 3), n=200, k=416, tail=1, index=torch.int64))
    packed.check("cuda", Case(format, sizes=tuple(i * 7 % 31 for i in range(512)), n=72, k=160))


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_results_with_bias_and_factors(format: PackedFormat, dtype: torch.dtype) -> None:
    packed.check("cuda", Case(format, n=264, k=544, out_dtype=dtype, bias=torch.bfloat16, factors=True))
    packed.check("cuda", Case(format, n=264, k=544, out_dtype=dtype, bias=torch.float32))


@each_format
def test_every_value_is_exact(format: PackedFormat) -> None:
    packed.check_every_value("cuda", format)


@each_format
def test_nan_reaches_its_own_column_alone(format: PackedFormat) -> None:
    packed.check_nan("cuda", format)


@pytest.mark.hopper
@pytest.mark.parametrize("recipe", [fusible.MXFP8(), fusible.MXFP4(), fusible.NVFP4()], ids=str)
def test_few_rows_of_quantised_experts_are_those_of_dequantised_weights(recipe) -> None:
    packed.check_experts(Kernels("cuda"), recipe, "grouped_mm")
