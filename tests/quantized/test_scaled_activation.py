"""Products of e4m3 operands that end in a quantised activation, on the CPU (tests/emulation).

The checks are those of a GPU (test_scaled_activation_cuda.py), on small problems.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import scaled_activation as checks
from checks.quantize import FUNCTIONS
from checks.scaled import Case
from emulation import build

from fusible.ops.kernels.hopper import scaled_activation as hopper
from fusible.ops.kernels.problems.quantized import ActivatedScaledGemm

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]

RAGGED = (131, 0, 70, 1, 64)


def check(name: str, n: int, sizes: tuple[int, ...] = RAGGED, **asked: object) -> None:
    case = {key: asked.pop(key) for key in ("k", "tail", "out_dtype", "bias", "index", "gap") if key in asked}
    checks.check_activation("cpu", replace(Case(sizes, n=n), **case), name, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["silu glu", "relu2 glu", "limited"])
def test_gate_and_up_behind_one_another(name: str) -> None:
    check(name, n=512, gap=16)
    check(name, n=256, k=16, sizes=(3,), tail=0)


@pytest.mark.parametrize(("name", "n"), [("blocks of 1", 544), ("blocks of 2", 96), ("blocks of 4", 288)])
def test_gate_and_up_that_alternate(name: str, n: int) -> None:
    """The last block of the rows, and the last tile, may be partial."""
    check(name, n=n)


@pytest.mark.parametrize(("name", "n"), [("blocks of 32", 320), ("blocks of 128", 768)])
def test_blocks_of_gate_and_up(name: str, n: int) -> None:
    check(name, n=n)


@pytest.mark.parametrize(("name", "n"), [("sigmoid", 400), ("gelu_tanh", 144)])
def test_no_gate(name: str, n: int) -> None:
    """Absent elements count as zero, although their sigmoid is a half."""
    check(name, n=n)


def test_deep_products_of_many_tiles() -> None:
    check("silu glu", n=512, k=656, sizes=(200, 0, 129, 260), tail=5)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_types_scales_and_biases(dtype: torch.dtype, power_of_two: bool) -> None:
    check("silu glu", n=256, out_dtype=dtype, bias=torch.float32, scales=dtype, power_of_two=power_of_two)
    check("blocks of 1", n=160, out_dtype=dtype, bias=dtype, scales=None, power_of_two=power_of_two, index=torch.int64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_users(name: str) -> None:
    n = 512 if checks.spec_of(name).block in (None, 128) else 544
    check(name, n=n)
    check(name, n=n, bias=torch.float32, scales=None, out_dtype=torch.float16, power_of_two=False)


def test_no_rows() -> None:
    hopper.run(checks.make("cpu", Case((0, 0), n=256, tail=0), "silu glu"))


def problem(name: str = "silu glu", n: int = 256) -> ActivatedScaledGemm:
    return checks.make("cpu", Case((30,), n=n), name)


@pytest.mark.parametrize(
    ("name", "n", "reason"),
    [
        ("silu glu", 288, "halves that are multiples of 128"),
        ("silu glu", 272, "multiples of 16"),
        ("sigmoid", 264, "multiples of 16"),
    ],
)
def test_sizes_that_are_refused(name: str, n: int, reason: str) -> None:
    assert reason in (hopper.refusal(problem(name, n)) or "")


def test_problems_that_are_refused() -> None:
    good = problem()
    assert hopper.refusal(good) is None
    wide = replace(good.product, out=good.product.out.float())
    assert "bfloat16 or float16" in (hopper.refusal(replace(good, product=wide)) or "")
    scaled = replace(good.product, row_scale=torch.ones(30))
    assert "no factor" in (hopper.refusal(replace(good, product=scaled)) or "")
    assert "dense scales" in (hopper.refusal(replace(good, scales=torch.ones(60)[::2])) or "")
    odd = replace(good.activation, block=48)
    assert "no tile for blocks of 48" in (hopper.refusal(replace(good, activation=odd)) or "")
