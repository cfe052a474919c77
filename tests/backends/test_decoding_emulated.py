"""The kernel that decodes stored weights, on the CPU (tests/emulation)."""

from __future__ import annotations

import pytest
import torch
from checks import decoding as checks
from checks.decoding import Stored
from checks.packed import unpacked
from emulation import build
from torch import Tensor

from fusible import MXFP4, NF4, Float8Weight, Int4, NVFP4Weight, config
from fusible.fuser.contract import tracing
from fusible.ops.formats.copies import PackedFormat, Weight
from fusible.ops.formats.weight_only import WeightOnly
from fusible.ops.kernels.doors.decoding import decode_packed, decode_weight
from fusible.ops.kernels.hopper import decode

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]


@pytest.mark.parametrize("shape", checks.SHAPES, ids=str)
@pytest.mark.parametrize("stored", checks.STORED, ids=checks.IDS)
def test_kernel(stored: Stored, shape: tuple[int, int, int]) -> None:
    checks.check_decode("cpu", stored, shape, torch.bfloat16)


@pytest.mark.parametrize("stored", checks.STORED, ids=checks.IDS)
def test_kernel_in_float16(stored: Stored) -> None:
    checks.check_decode("cpu", stored, checks.SHAPES[0], torch.float16)


@pytest.mark.parametrize("stored", checks.STORED, ids=checks.IDS)
def test_kernel_rounds_as_pytorch(stored: Stored) -> None:
    checks.check_as_pytorch("cpu", stored, (3, 136, 384))


def test_every_byte_and_every_scale_byte() -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(1, 256, 256)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    factor = torch.tensor([[0.0123]])
    mx = Weight(data, scales.expand(1, 256, 16).contiguous().view(torch.float8_e8m0fnu))
    nv = Weight(data, scales.expand(1, 256, 32).contiguous().view(torch.float8_e4m3fn), factor)
    fp8 = Weight(data.view(torch.float8_e4m3fn), torch.rand(1, 2, 2))
    for format, weight in ((MXFP4(), mx), (NVFP4Weight(), nv), (NVFP4Weight(divides=True), nv), (Float8Weight(), fp8)):
        out = torch.empty(1, 256, 256 * format.values_in_byte, dtype=torch.bfloat16)
        checks.decoded_into(out, format, weight)
        assert checks.same_bits(out, format.decoded(weight, torch.bfloat16))


@pytest.mark.parametrize("format", [MXFP4(), NF4(nested=True), Float8Weight()], ids=repr)
def test_the_door_runs_the_kernel(format: WeightOnly) -> None:
    weight = format.weight(torch.randn(2, 24, 128))
    like, parts = torch.empty(0, dtype=torch.bfloat16), weight.tensors
    with config(backend="hopper"):
        out = decode_weight(*parts, like, format)  # type: ignore[arg-type]
        with tracing.recording() as seen:
            decode_weight(*parts, like, format)  # type: ignore[arg-type]

    assert checks.same_bits(out, format.decoded(weight, torch.bfloat16))
    (call,) = seen.calls
    assert call.kernel == f"hopper (decode {format.name})"
    assert call.configuration.startswith(f"{format.name}, 2 x 24 x ")


def test_nothing_is_launched_for_no_weights() -> None:
    weight, like = MXFP4().weight(torch.randn(2, 24, 64)), torch.empty(0, dtype=torch.bfloat16)
    assert weight.scales is not None
    with config(backend="hopper"):
        assert decode_weight(weight.data[:0], weight.scales[:0], None, like, MXFP4()).shape == (0, 24, 64)


@pytest.mark.parametrize("format", PackedFormat, ids=str)
def test_the_door_decodes_packed_weights(format: PackedFormat) -> None:
    recipe = {PackedFormat.MXFP8: Float8Weight(), PackedFormat.NVFP4: NVFP4Weight(), PackedFormat.MXFP4: MXFP4()}
    weight = recipe[format].weight(torch.randn(2, 24, 128))
    scales = torch.full((2, 24, 4), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    scales = weight.scales if format is PackedFormat.NVFP4 else scales
    assert scales is not None
    with config(backend="hopper"):
        out = decode_packed(weight.data, scales, format)

    assert checks.same_bits(out, unpacked(weight.data, scales, format))


def test_what_is_refused() -> None:
    def why(format: WeightOnly, columns: int, dtype: torch.dtype = torch.bfloat16, strided: bool = False) -> str:
        weight = format.weight(torch.randn(2, 16, columns))
        weight = weight._replace(data=weight.data[:, ::2], scales=weight.scales) if strided else weight
        out = torch.empty(2, weight.data.shape[1], columns, dtype=dtype)
        return str(decode.refusal(checks.problem(format, weight, out)))

    assert why(MXFP4(), 64) == "None"
    assert "decodes to 16 bits, not torch.float32" in why(MXFP4(), 64, torch.float32)
    assert "needs scales of 8 values times a power of two, got one for 24" in why(Int4(24), 48)
    assert "needs rows of a multiple of 8 values, got 20" in why(Float8Weight(), 20)
    assert "needs dense data, got strides" in why(MXFP4(), 64, strided=True)


def test_what_is_not_aligned_is_named() -> None:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor)

    weight, out = MXFP4().weight(torch.randn(2, 16, 64)), torch.empty(2, 16, 64, dtype=torch.bfloat16)
    for given, to, why in (
        (weight._replace(data=moved(weight.data)), out, "needs data aligned to 8 bytes, got the address"),
        (weight, moved(out), "needs out aligned to 16 bytes, got the address"),
    ):
        assert why in str(decode.refusal(checks.problem(MXFP4(), given, to)))
