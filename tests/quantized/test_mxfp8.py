"""MXFP8: bytes and scales of TransformerEngine, exact values, and the way to blocks of 128."""

from __future__ import annotations

from math import inf, isinf, isnan, log2, nan

import pytest
import scalar_quantisers as scalar
import torch
from torch import Tensor

from fusible import grouped_gemm
from fusible.ops.formats import mxfp8, reference
from fusible.ops.formats.copies import Rows
from fusible.ops.formats.formats import E4M3, cast_e8m0, from_e8m0

SIZES = [70, 0, 130, 1]
RECIPROCAL = scalar.float32(1 / 448)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def bytes_of(data: Tensor) -> Tensor:
    return data.view(torch.uint8)


def exponent_of(amax: float) -> int:
    """TransformerEngine's float_to_e8m0 (common/util/ptx_arch_spec.cuh) in words: up to the next power of two."""
    value = scalar.float32(amax * RECIPROCAL)
    if isnan(value):
        return 255
    if isinf(value):
        return 254
    if value <= 2.0**-127:
        return 0
    mantissa, exponent = value.hex().split("p")
    return int(exponent) + (mantissa != "0x1.0000000000000") + 127


def block(x: Tensor) -> tuple[Tensor, int]:
    values = x.double().flatten().tolist()
    amax = nan if any(map(isnan, values)) else max(map(abs, values))
    exponent = exponent_of(amax)
    inverse = nan if exponent == 255 else 2.0 ** (127 - exponent)
    codes = [scalar.nearest(scalar.float32(value * inverse)) for value in values]
    return torch.tensor(codes, dtype=torch.uint8).view(x.shape), exponent


def varied(tokens: int, features: int) -> Tensor:
    magnitudes = torch.randn(tokens, 1).exp() * torch.randn(features).exp()
    return (torch.randn(tokens, features) * magnitudes).bfloat16()


def test_scales_of_every_amax() -> None:
    amax = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)

    rows = mxfp8.quantize_rows(amax.unsqueeze(1))

    exponents = [exponent_of(value) for value in amax.tolist()]
    assert bytes_of(rows.scales).flatten().tolist() == exponents
    for value, exponent in list(zip(amax.tolist(), exponents, strict=True))[300:32640]:
        assert exponent - 127 >= log2(value / 448) > exponent - 128 or exponent == 0


def test_floats_beside_every_power_of_two_are_rounded_up() -> None:
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    near = torch.cat([(powers.float().view(torch.int32) + ulps).view(torch.float32) for ulps in (-1, 0, 1)])
    values = near[near.isfinite()].abs()

    exponents = from_e8m0(cast_e8m0(values)).double()

    assert (exponents >= values.clamp(max=2.0**127)).all()
    assert ((exponents < 2 * values.double()) | (exponents == 2.0**-127)).all()


@pytest.mark.parametrize("features", [32, 80, 130])
def test_rows_are_those_of_transformer_engine(features: int) -> None:
    x = varied(5, features)

    rows = mxfp8.quantize_rows(x)

    assert rows.scales.shape == (5, -(-features // 32))
    for token in range(5):
        for b, span in enumerate(scalar.spans(features, size=32)):
            codes, exponent = block(x[token, span])
            assert torch.equal(bytes_of(rows.data)[token, span], codes)
            assert bytes_of(rows.scales)[token, b] == exponent


def test_columns_are_blocks_of_one_group() -> None:
    x = varied(206, 7)
    x[201:] = nan

    columns = mxfp8.quantize_columns(x, torch.tensor(SIZES))

    row, start = 0, 0
    assert columns.scales.shape == (206 // 32 + 4, 7)
    for size in SIZES:
        for span in scalar.spans(start + size, start, 32):
            for k in range(7):
                codes, exponent = block(x[span, k])
                assert torch.equal(bytes_of(columns.data)[span, k], codes)
                assert bytes_of(columns.scales)[row, k] == exponent
            row += 1
        start += size
    assert (bytes_of(columns.data)[201:] == 0).all()


def test_every_byte_times_every_scale_is_exact_in_bfloat16() -> None:
    codes = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8)
    exponents = torch.arange(3, 247, dtype=torch.uint8)
    data = codes.repeat(len(exponents), 1)
    scales = exponents.repeat_interleave(-(-len(codes) // 32)).view(len(exponents), -1)

    values = mxfp8.dequantize_rows(Rows(data.view(E4M3.dtype), scales.view(torch.float8_e8m0fnu)))

    magnitudes = torch.tensor(scalar.FINITE["e4m3"], dtype=torch.float64)
    signed = torch.where(codes < 128, magnitudes[(codes % 128).long()], -magnitudes[(codes % 128).long()])
    assert torch.equal(values.double(), signed * 2.0 ** (exponents.double() - 127).unsqueeze(1))


def test_the_last_scales_are_a_subnormal_and_nan() -> None:
    values = from_e8m0(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))

    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert values[4].isnan()


def test_what_is_not_finite() -> None:
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[0, 0], x[1, 0], x[2] = inf, nan, 0

    rows = mxfp8.quantize_rows(x)

    assert bytes_of(rows.scales).tolist() == [[254, 119], [255, 119], [0, 0]]
    assert mxfp8.dequantize_rows(rows).isnan().any(1).tolist() == [False, True, False]
    assert (mxfp8.dequantize_rows(rows)[2] == 0).all()


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_what_is_not_finite_makes_the_scales_of_blocks_of_128_nan(value: float) -> None:
    x = torch.ones(4, 160, dtype=torch.bfloat16)
    x[1, 40] = value

    rows, weight = mxfp8.quantize_rows(x), mxfp8.quantize_rows(x.unsqueeze(0))
    sizes = torch.tensor([3, 1])
    columns = mxfp8.regroup_columns(mxfp8.quantize_columns(x, sizes), sizes)

    assert mxfp8.regroup_rows(rows).scales[:, :4].isnan().tolist() == [[False, True, False, False], [False] * 4]
    assert mxfp8.regroup_weight(weight, 1).scales.isnan().tolist() == [[[True, False]]]
    assert columns.scales.isnan().nonzero().tolist() == [[0, 40]]


def test_columns_come_back_as_rows() -> None:
    x, sizes = varied(206, 20), torch.tensor(SIZES)

    values = mxfp8.dequantize_columns(mxfp8.quantize_columns(x, sizes), sizes, torch.float32)

    assert (values[:201] - x[:201].float()).norm() < 0.04 * x[:201].float().norm()
    assert (values[201:] == 0).all()


def test_products_are_those_of_the_bytes() -> None:
    """The exact way to multiply: operands that are exact in bfloat16, in the grouped product of 16 bits."""
    x, weight, sizes = varied(201, 96), varied(4 * 24, 96).view(4, 24, 96), torch.tensor(SIZES)
    a, b = mxfp8.dequantize_rows(mxfp8.quantize_rows(x)), mxfp8.dequantize_rows(mxfp8.quantize_rows(weight))

    y = grouped_gemm(a, b, sizes)

    parts = zip(a.double().split(SIZES), b.double(), strict=True)
    exact = torch.cat([part @ matrix.t() for part, matrix in parts])
    assert (y.double() - exact).norm() < 2**-8 * exact.norm()
    near = torch.cat([p @ m.t() for p, m in zip(x.double().split(SIZES), weight.double(), strict=True)])
    assert (y.double() - near).norm() < 0.05 * near.norm()


# ------------------------------------------------------------------------------------------- blocks of 128


def test_rows_regroup_without_another_rounding() -> None:
    x = varied(9, 200)
    rows = mxfp8.quantize_rows(x)

    blocks = mxfp8.regroup_rows(rows)

    exact, values = mxfp8.dequantize_rows(rows, torch.float32), reference.dequantize_rows(blocks)
    step = 2.0**-9 * blocks.scales[:, :9].t().repeat_interleave(128, 1)[:, :200]
    assert blocks.scales.shape == (2, 12)
    assert torch.equal(values[exact.abs() >= 8 * step], exact[exact.abs() >= 8 * step])
    assert ((values - exact).abs() <= step / 2).all()
    largest = from_e8m0(rows.scales)[:, :4].amax(1)
    assert torch.equal(blocks.scales[0, :9], largest)


def test_columns_regroup_without_another_rounding() -> None:
    x, sizes = varied(206, 20), torch.tensor(SIZES)
    columns = mxfp8.quantize_columns(x, sizes)

    blocks = mxfp8.regroup_columns(columns, sizes)

    tokens = reference.token_blocks(sizes, 206)
    exact = reference.gather(mxfp8.dequantize_columns(columns, sizes, torch.float32), tokens).transpose(1, 2)
    step = 2.0**-9 * blocks.scales.unsqueeze(-1)
    values = reference.dequantize_columns(blocks)
    assert ((values - exact).abs() <= step / 2).all()
    assert torch.equal(values[exact.abs() >= 8 * step], exact[exact.abs() >= 8 * step])
    assert (bytes_of(blocks.data).transpose(1, 2)[~tokens.valid] == 0).all()
    assert torch.equal(blocks.scales[0], from_e8m0(columns.scales[:3]).amax(0))


@pytest.mark.parametrize("halves", [1, 2])
def test_weights_regroup_without_another_rounding(halves: int) -> None:
    weight = varied(2 * 260, 200).view(2, 260, 200)
    rows = mxfp8.quantize_rows(weight)

    blocks = mxfp8.regroup_weight(rows, halves)

    exact, values = mxfp8.dequantize_rows(rows, torch.float32), reference.dequantize_weight(blocks, halves)
    step = 2.0**-9 * reference.weight_scales(blocks.scales, weight.shape, halves)
    assert ((values - exact).abs() <= step / 2).all()
    assert torch.equal(values[exact.abs() >= 8 * step], exact[exact.abs() >= 8 * step])
    last = from_e8m0(rows.scales)[1, 260 - 260 // halves :][: min(128, 260 // halves), :4].amax()
    assert blocks.scales[1, -(-260 // halves // 128) * (halves - 1), 0] == last


def test_normal_values_regroup_to_what_blocks_of_128_give() -> None:
    x = torch.randn(64, 512).bfloat16()

    regrouped = reference.dequantize_rows(mxfp8.regroup_rows(mxfp8.quantize_rows(x)))

    direct = reference.dequantize_rows(reference.quantize_rows(x, True))
    assert (regrouped != direct).float().mean() < 1e-3
