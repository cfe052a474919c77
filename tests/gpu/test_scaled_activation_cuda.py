"""Products of e4m3 operands that end in a quantised activation; needs an H100 or H200 and the built extension."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from checks.device import skip_module_without_hopper
from checks.quantize import FUNCTIONS, SPECS, spec_of
from checks.scaled import Case
from checks.scaled_activation import check_activation, make

from fusible.ops.kernels.hopper import scaled_activation as hopper

pytestmark = pytest.mark.cuda
skip_module_without_hopper()

RAGGED = (131, 0, 77, 304, 1, 512)
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", list(SPECS))
def test_activations(name: str) -> None:
    for n in (256, 768, 1536):
        check_activation("cuda", Case(RAGGED, n=n, k=528), name)


@pytest.mark.parametrize(("name", "n"), [("blocks of 1", 5760), ("blocks of 2", 96), ("sigmoid", 400)])
def test_partial_blocks(name: str, n: int) -> None:
    check_activation("cuda", Case(RAGGED, n=n, k=2880), name)


SPILLING = "user's biases"
"""Reads three numbers of a column in float32: beside a product of e4m3 there are no registers for them."""


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != SPILLING])
def test_functions_of_users(name: str) -> None:
    for n in (768, 1536) if spec_of(name).block in (None, 128) else (544, 5760):
        check_activation("cuda", Case(RAGGED, n=n, k=528), name)


def test_a_function_that_needs_more_registers_is_refused() -> None:
    assert "spill" in str(hopper.refusal(make("cuda", Case(RAGGED, n=768, k=528), SPILLING)))


def test_one_group_of_every_size() -> None:
    for size in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 1000, 2500):
        check_activation("cuda", Case((size,), n=512, k=272, tail=size % 3), "silu glu")


@pytest.mark.parametrize(("dtype", "biased", "power_of_two"), list(product(DTYPES, [False, True], [False, True])))
def test_types_scales_and_biases(dtype: torch.dtype, biased: bool, power_of_two: bool) -> None:
    for name in ("silu glu", "blocks of 1"):
        case = Case(RAGGED, n=1536, k=1040, out_dtype=dtype, bias=dtype if biased else None)
        check_activation("cuda", case, name, scales=dtype if biased else None, power_of_two=power_of_two)


def test_many_groups_and_deep_products() -> None:
    check_activation("cuda", Case(tuple(i * 37 % 131 for i in range(512)), n=256, k=144), "silu glu")
    check_activation("cuda", Case((3000, 0, 900, 20), n=2048, k=7168), "silu glu")
