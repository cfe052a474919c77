"""The kernel that transposes bytes, on the CPU (tests/emulation)."""

from __future__ import annotations

import pytest
import torch
from checks import transposition as checks
from checks.transposition import bytes_of
from emulation import build, harness
from torch import Tensor

from fusible import config
from fusible.fuser.contract import tracing
from fusible.ops.kernels.doors.transposition import transpose_bytes
from fusible.ops.kernels.hopper import transpose
from fusible.ops.kernels.problems.transposition import ByteTransposition

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]


@pytest.mark.parametrize("shape", checks.SHAPES, ids=str)
def test_kernel(shape: tuple[int, int, int]) -> None:
    checks.check_transpose("cpu", *shape)


def test_kernel_of_addresses_that_are_not_aligned(emulation: harness.Emulation) -> None:
    with emulation.shuffled(1):
        checks.check_transpose("cpu", 2, 144, 272, offset=8)


@pytest.mark.parametrize("shape", [(3, 136, 160), (0, 16, 16), (2, 0, 16)], ids=str)
def test_the_door_runs_the_kernel(shape: tuple[int, int, int]) -> None:
    data = bytes_of(*shape).view(torch.float8_e4m3fn)
    with config(backend="hopper"):
        out = transpose_bytes(data)
        with tracing.recording() as seen:
            transpose_bytes(data)

    assert torch.equal(out.view(torch.uint8), data.view(torch.uint8).mT)
    assert [call.kernel for call in seen.calls] == ["hopper (transpose)"]


def test_what_is_refused() -> None:
    def refusal(data: Tensor) -> str | None:
        return transpose.refusal(ByteTransposition(data, data))

    assert refusal(bytes_of(2, 16, 32)) is None
    assert "elements of 8 bits, not torch.bfloat16" in str(refusal(torch.ones(2, 16, 16).bfloat16()))
    assert "dense matrices, got strides" in str(refusal(bytes_of(2, 16, 32)[:, :, ::2]))
