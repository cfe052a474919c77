"""The kernels that quantise, bit for bit against the reference on the CPU; needs the built extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from checks import quantize as checks
from checks import quantize_whole as whole
from checks.device import needs_hopper

from fusible.ops.formats.copies import Scaling

pytestmark = [pytest.mark.cuda, needs_hopper]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("want", ["rows and columns", "rows", "columns"])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_rows(sizes, dtype, want, power_of_two):
    for features, pitch in ((16, 0), (128, 8), (400, 0), (2880, 0)):
        checks.check_rows("cuda", sizes, features, dtype, want=want, power_of_two=power_of_two, pitch=pitch)


@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_columns_of_bytes(sizes):
    for features, pitch in ((16, 0), (128, 8), (400, 0), (2880, 0), (2048, 0)):
        checks.check_columns_of_bytes("cuda", sizes, features, pitch=pitch)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("groups", [1, 70, 512])
def test_rows_of_many_groups(groups, index):
    checks.check_rows("cuda", [g * 37 % 300 for g in range(groups)], 1040, index=index, tail=129)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_every_amax(dtype, power_of_two):
    checks.check_every_amax_of_rows("cuda", dtype, power_of_two, slice(None))
    checks.check_every_amax_of_columns("cuda", dtype, power_of_two, slice(None))


@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_every_value(dtype):
    checks.check_every_value("cuda", dtype)


@pytest.mark.parametrize("asked", checks.WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [*checks.HALVES, torch.float32], ids=str)
def test_weight(dtype, asked):
    checks.check_weight("cuda", dtype=dtype, **asked)


def test_weights_of_many_experts():
    checks.check_weight("cuda", 130, 256, 128, separate=True)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
@pytest.mark.parametrize("name", checks.SPECS)
def test_activation(name, dtype, power_of_two):
    for want, scales, features in (("rows", None, 768), ("rows and columns", torch.float32, 1024)):
        checks.check_activation("cuda", name, features, dtype, power_of_two=power_of_two, want=want, scales=scales)
    if checks.SPECS[name].block in (None, 1, 2, 4):
        checks.check_activation("cuda", name, 2880, dtype, want="columns", scales=torch.bfloat16)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
@pytest.mark.parametrize("name", [name for name in checks.SPECS if name != "blocks of 32"])
def test_activation_backward(name, dtype, power_of_two):
    sizes = [300, 0, 77, 1, 128, 0, 129]
    for want, scales in (("rows", None), ("rows, columns", torch.float32), ("columns, postact, dscales", dtype)):
        asked = {"want": want, "scales": scales, "power_of_two": power_of_two, "sizes": sizes}
        checks.check_activation_backward("cuda", name, 768, dtype, **asked)
    if not checks.SPECS[name].gated or checks.SPECS[name].block in (1, 2, 4):
        checks.check_activation_backward("cuda", name, 2880, dtype)
        checks.check_activation_backward("cuda", name, 2960, dtype, sizes=sizes)


@pytest.mark.parametrize("want", ["rows and columns", "rows", "columns"])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_gathered_rows(dtype, want):
    checks.check_gathered_rows("cuda", 700, 3, 2880, dtype, want)


of_whole = pytest.mark.parametrize("scaling", whole.WHOLE, ids=lambda scaling: scaling.value)


@of_whole
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("want", ["rows and columns", "rows", "columns"])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
@pytest.mark.parametrize("sizes", checks.SIZES, ids=str)
def test_whole_rows(sizes, dtype, want, power_of_two, scaling):
    for features, pitch in ((16, 0), (128, 8), (400, 0), (2880, 0)):
        options = {"want": want, "power_of_two": power_of_two, "pitch": pitch}
        whole.check_rows("cuda", sizes, features, scaling, dtype, **options)


@of_whole
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("groups", [1, 70, 512])
def test_whole_rows_of_many_groups(groups, index, scaling):
    whole.check_rows("cuda", [g * 37 % 300 for g in range(groups)], 1040, scaling, index=index, tail=129)


@of_whole
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_every_whole_amax(dtype, scaling, power_of_two):
    part = slice(None) if scaling is Scaling.ROWS else slice(3, None, 64)
    whole.check_every_amax("cuda", scaling, dtype, power_of_two, part)


@pytest.mark.parametrize("dtype", checks.HALVES, ids=str)
def test_scales_of_steps_before(dtype):
    whole.check_earlier_scales("cuda", dtype)


@of_whole
@pytest.mark.parametrize("want", ["rows and columns", "rows", "columns"])
def test_whole_rows_that_are_gathered(scaling, want):
    whole.check_gathered_rows("cuda", scaling, 700, 3, 2880, want)


@of_whole
@pytest.mark.parametrize("asked", whole.WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [*checks.HALVES, torch.float32], ids=str)
def test_weight_of_whole_scales(dtype, scaling, asked):
    whole.check_weight("cuda", scaling=scaling, dtype=dtype, **asked)


@of_whole
def test_weights_of_many_experts_and_whole_scales(scaling):
    whole.check_weight("cuda", 130, 256, 128, scaling, separate=True)


@pytest.mark.hopper
@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_functions_of_users(name: str) -> None:
    sizes = (300, 0, 1, 129, 64)
    for features in (256, 768):
        checks.check_activation("cuda", name, features, sizes=sizes)
        checks.check_activation_backward("cuda", name, features, sizes=sizes)
    if checks.spec_of(name).block in (1, 2, 4):
        checks.check_activation_backward("cuda", name, 2960, sizes=sizes)
