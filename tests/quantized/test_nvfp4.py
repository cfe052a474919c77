"""NVFP4: bytes and scales by TransformerEngine's formulas, exact values, the transform, stochastic rounding."""

from __future__ import annotations

from math import inf

import pytest
import scalar_quantisers as scalar
import torch
from torch import Tensor

from fusible import grouped_gemm
from fusible.ops.formats import formats, nvfp4
from fusible.ops.formats.formats import E4M3
from fusible.ops.formats.nvfp4 import NVFP4Data

SIZES = [18, 0, 33, 1]
LARGEST = float(torch.finfo(torch.float32).max)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def bytes_of(data: Tensor) -> Tensor:
    return data.view(torch.uint8)


def varied(tokens: int, features: int) -> Tensor:
    magnitudes = torch.randn(tokens, 1).exp() * torch.randn(features).exp()
    return (torch.randn(tokens, features) * magnitudes).bfloat16()


def value_of(code: int) -> float:
    """The value of an e4m3 code."""
    return scalar.FINITE["e4m3"][code]


def block(x: Tensor, amax: float) -> tuple[list[int], int]:
    """Codes and scale of a block by core_nvfp4.cuh and reference_nvfp4.py: each line one operation of float32."""
    group = min(scalar.float32(2688 / amax), LARGEST) if amax not in (0.0, inf) else 1.0
    multiplier = scalar.float32(group * scalar.float32(1 / 6))
    scale = scalar.nearest(min(scalar.float32(float(x.abs().amax()) * multiplier), LARGEST))
    product = scalar.float32(value_of(scale) * scalar.float32(1 / group))
    encode = min(scalar.float32(1 / product), LARGEST) if product else LARGEST
    return [scalar.nearest(scalar.float32(v * encode), "e2m1") for v in x.double().flatten().tolist()], scale


def codes_of(packed: Tensor) -> Tensor:
    """The low bits of each byte first."""
    return torch.stack((packed % 16, packed // 16), -1).flatten(-2)


def test_rows_are_those_of_transformer_engine() -> None:
    x = varied(55, 48)
    x[3] = 0
    x[20] *= 2.0**-30

    rows = nvfp4.quantize_rows(x, torch.tensor(SIZES))

    start = 0
    for group, size in enumerate(SIZES):
        amax = float(x[start : start + size].abs().amax()) if size else 0.0
        assert rows.amax[group] == amax
        for token in range(start, start + size):
            for b, span in enumerate(scalar.spans(48, size=16)):
                codes, scale = block(x[token, span], amax)
                assert codes_of(rows.data)[token, span].tolist() == codes
                assert bytes_of(rows.scales)[token, b] == scale
        start += size
    assert rows.data.shape == (55, 24)


def test_weights_have_blocks_of_16_x_16() -> None:
    weight = varied(2 * 40, 32).view(2, 40, 32)

    copies = nvfp4.quantize_weight(weight)

    assert copies.data.shape == (2, 40, 16)
    assert copies.scales.shape == (2, 40, 2)
    for expert in range(2):
        amax = float(weight[expert].abs().amax())
        for by_row in scalar.spans(40, size=16):
            for b, span in enumerate(scalar.spans(32, size=16)):
                codes, scale = block(weight[expert, by_row, span], amax)
                assert codes_of(copies.data)[expert, by_row, span].flatten().tolist() == codes
                assert (bytes_of(copies.scales)[expert, by_row, b] == scale).all()


@pytest.mark.parametrize("is_transformed", [False, True])
def test_columns_are_blocks_of_one_group(is_transformed: bool) -> None:
    x = varied(55, 5)

    columns = nvfp4.quantize_columns(x, torch.tensor(SIZES), is_transformed)

    first, start = 0, 0
    assert columns.data.shape == (55 // 16 + 4, 5, 8)
    for group, size in enumerate(SIZES):
        blocks = [torch.zeros(5, 16, dtype=x.dtype) for _ in scalar.spans(size, size=16)]
        for values, span in zip(blocks, scalar.spans(start + size, start, 16), strict=True):
            values[:, : span.stop - span.start] = x[span].t()
        blocks = [nvfp4.transform(values) for values in blocks] if is_transformed else blocks
        amax = max((float(values.abs().amax()) for values in blocks), default=0.0)
        assert columns.amax[group] == amax
        for index, values in enumerate(blocks, first):
            for k in range(5):
                codes, scale = block(values[k], amax)
                assert codes_of(columns.data)[index, k].tolist() == codes
                assert bytes_of(columns.scales)[index, k] == scale
        first, start = first + len(blocks), start + size


def test_every_code_times_every_scale_is_exact_in_bfloat16() -> None:
    scales = torch.arange(127, dtype=torch.uint8).view(E4M3.dtype)
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)

    values = nvfp4.dequantize(NVFP4Data(formats.pack(codes), scales.unsqueeze(1), torch.ones(1)))

    magnitudes = scalar.FINITE["e2m1"] + [-value for value in scalar.FINITE["e2m1"]]
    expected = torch.tensor(scalar.FINITE["e4m3"]).double().unsqueeze(1) * torch.tensor(magnitudes).double()
    assert torch.equal(values.double(), expected)
    assert torch.equal(formats.unpack(formats.pack(codes)), codes)


@pytest.mark.parametrize("amax", [0.0, inf, 1e-38, 3e38])
def test_the_scale_of_a_group_is_finite(amax: float) -> None:
    encode = nvfp4.encode_scales(torch.tensor([amax]))

    assert encode.item() == (1.0 if amax in (0.0, inf) else min(scalar.float32(2688 / scalar.float32(amax)), LARGEST))


def test_products_are_those_of_the_codes() -> None:
    x, weight, sizes = torch.randn(52, 64).bfloat16(), torch.randn(4, 24, 64).bfloat16(), torch.tensor(SIZES)
    a, b = nvfp4.quantize_rows(x, sizes), nvfp4.quantize_weight(weight)

    y = grouped_gemm(nvfp4.dequantize(a), nvfp4.dequantize(b), sizes, alpha=nvfp4.product_factors(a.amax, b.amax))

    parts = zip(x.double().split(SIZES), weight.double(), strict=True)
    near = torch.cat([part @ matrix.t() for part, matrix in parts])
    assert (y.double() - near).norm() < 0.18 * near.norm()
    parts = zip(nvfp4.dequantize(a).double().split(SIZES), nvfp4.dequantize(b).double(), strict=True)
    factors = a.amax.double() * b.amax.double() / 2688**2
    exact = torch.cat([f * (part @ matrix.t()) for f, (part, matrix) in zip(factors, parts, strict=True)])
    assert (y.double() - exact).norm() < 2**-8 * exact.norm()


def test_the_transform_is_orthogonal_and_keeps_products() -> None:
    matrix = nvfp4.hadamard()
    a, b = torch.randn(3, 16), torch.randn(5, 16)

    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(16))
    torch.testing.assert_close(nvfp4.transform(a) @ nvfp4.transform(b).t(), a @ b.t())
    assert (matrix[3] < 0).sum() > (matrix[0] < 0).sum()
    assert matrix[0].tolist() == [0.25] * 16
    assert matrix[3, 0] == -0.25
    assert matrix[1].tolist() == [0.25, -0.25] * 8


def test_stochastic_rounding_is_right_on_average_and_exact_on_codes() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([0.1, 0.5, 0.9, 2.25, 5.5, 6.0, 100.0, -0.3, -4.5]).repeat(20000, 1)

    random = torch.rand(values.shape, generator=generator)
    rounded = formats.from_e2m1(formats.cast_e2m1_stochastic(values, random))

    means = [0.1, 0.5, 0.9, 2.25, 5.5, 6.0, 6.0, -0.3, -4.5]
    torch.testing.assert_close(rounded.mean(0), torch.tensor(means), rtol=0, atol=0.03)
    assert [sorted(column.unique().tolist()) for column in rounded.t()] == [
        [0.0, 0.5], [0.5], [0.5, 1.0], [2.0, 3.0], [4.0, 6.0], [6.0], [6.0], [-0.5, 0.0], [-6.0, -4.0],
    ]  # fmt: skip


def test_a_seed_decides_how_rows_are_rounded() -> None:
    x, sizes = torch.randn(52, 64).bfloat16(), torch.tensor(SIZES)

    first, second, third = (nvfp4.quantize_rows(x, sizes, torch.tensor([seed])).data for seed in (1, 1, 2))

    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_odd_features_are_refused() -> None:
    with pytest.raises(ValueError, match="NVFP4 needs features that are multiples of 16, got 24"):
        nvfp4.quantize_rows(torch.ones(3, 24), torch.tensor([3]))
