"""Adapters beside weights in 8 and 4 bits on the kernels of a GPU, on the CPU (tests/emulation): two small problems."""

from __future__ import annotations

import pytest
from checks import stored_lora as checks
from emulation import build

from fusible import MXFP4, NF4
from fusible.ops.formats.weight_only import WeightOnly

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]


@pytest.mark.parametrize("recipe", [MXFP4(), NF4(nested=True)], ids=repr)
def test_trains(recipe: WeightOnly) -> None:
    checks.check("cpu", recipe, experts=3, features=64, hidden=64, rows=(12,))


def test_products_decode_the_bytes() -> None:
    checks.check_decoded_within("cpu")
