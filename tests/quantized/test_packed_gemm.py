"""Products of packed weights on the CPU (tests/emulation); the checks are those of a GPU (test_packed_gemm_cuda.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import packed
from checks.packed import Case
from emulation import build

import fusible
from fusible.ops.formats.copies import PackedFormat
from fusible.ops.kernels.dispatch import refusal
from fusible.ops.kernels.hopper import packed_gemm as hopper

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]
each_format = pytest.mark.parametrize("format", PackedFormat, ids=lambda format: format.value)


@each_format
def test_groups_of_any_sizes(format: PackedFormat) -> None:
    packed.check("cpu", Case(format))
    packed.check("cpu", Case(format, sizes=(1, 1, 1), n=8, k=32, tail=0))
    packed.check("cpu", Case(format, sizes=(0, 65), n=200, k=416, tail=1, index=torch.int64))


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_results_with_bias_and_factors(format: PackedFormat, dtype: torch.dtype) -> None:
    packed.check("cpu", Case(format, out_dtype=dtype, bias=torch.bfloat16, factors=True))
    packed.check("cpu", Case(format, out_dtype=dtype, bias=torch.float32))


@each_format
def test_every_value_is_exact(format: PackedFormat) -> None:
    packed.check_every_value("cpu", format)


@each_format
def test_nan_reaches_its_own_column_alone(format: PackedFormat) -> None:
    packed.check_nan("cpu", format)


@each_format
def test_no_rows(format: PackedFormat) -> None:
    hopper.run(packed.make("cpu", Case(format, sizes=(0, 0), tail=0)))
    problem = packed.make("cpu", Case(format, sizes=(0, 0), tail=4))
    hopper.run(replace(problem, fresh=True))
    assert not problem.out.any()


@each_format
def test_what_is_refused(format: PackedFormat) -> None:
    problem = packed.make("cpu", Case(format))
    wide = torch.zeros(problem.a.shape[0], problem.a.shape[1] + 4, dtype=torch.bfloat16)
    many = packed.make("cpu", Case(format, sizes=(60, 0)))
    assert hopper.refusal(problem) is None
    assert refusal(problem) is None
    assert "65 rows of 2 groups are not few" in (refusal(many) or "")
    with fusible.config(backend="loop"):
        assert refusal(problem) == "config(backend='loop')"
    assert "multiplies bfloat16" in (hopper.refusal(replace(problem, a=problem.a.half())) or "")
    assert "aligned to 16 bytes" in (hopper.refusal(replace(problem, a=wide[:, :-4])) or "")
    assert "contiguous weights" in (hopper.refusal(replace(problem, scales=problem.scales[:, ::2])) or "")
    odd = replace(problem, a=problem.a[:, :80])
    assert ("multiples of 16 bytes" in (hopper.refusal(odd) or "")) == (format is not PackedFormat.MXFP8)
