"""The door to the transposition of bytes, on a CPU."""

from __future__ import annotations

import pytest
import torch
from checks.transposition import bytes_of

from fusible import RefusedError, config
from fusible.fuser.contract import tracing
from fusible.ops.kernels.doors.transposition import transpose_bytes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("backend", ["auto", "loop"])
def test_pytorch_transposes_on_a_cpu(backend: str, dtype: torch.dtype) -> None:
    data = bytes_of(2, 17, 33)
    with config(backend=backend):
        out = transpose_bytes(data.view(dtype))

    assert out.dtype == dtype
    assert out.is_contiguous()
    assert torch.equal(out.view(torch.uint8), data.mT)


def test_a_kernel_that_is_asked_for_by_name_is_refused_on_a_cpu() -> None:
    with config(backend="hopper"), pytest.raises(RefusedError, match="transposition of bytes has no kernel of hopper"):
        transpose_bytes(bytes_of(2, 16, 16))


@pytest.mark.parametrize("tensor", [bytes_of(2, 16, 32), torch.empty(2, 16, 32, device="meta", dtype=torch.int8)])
def test_a_trace_is_told_of_it(tensor: torch.Tensor) -> None:
    with tracing.recording() as seen:
        out = transpose_bytes(tensor)

    assert out.shape == (2, 32, 16)
    assert seen.calls == [tracing.KernelCall("torch (transpose)", "", 0, 2048, "2 x 16 x 32, 0.0 MB")]
