"""Quantisers, bit for bit: against the rule written out, and against the formulas of others where they are ours."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import pytest
import scalar_quantisers as scalar
import torch
from torch import Tensor

from fusible import Float8Block
from fusible.ops.formats import formats, reference
from fusible.ops.formats.copies import Rows
from fusible.ops.formats.formats import E4M3, E5M2, FORMATS

DTYPES = [torch.bfloat16, torch.float16]
both_scales = pytest.mark.parametrize("power_of_two", [True, False], ids=["pow2", "float32"])


def every(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a type of 16 bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def bytes_of(data: Tensor) -> Tensor:
    return data.view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal floats, NaN included and zeros told apart by sign."""
    nans = a.isnan()
    return bool((nans == b.isnan()).all()) and torch.equal(
        a.view(torch.int32).masked_fill(nans, 0), b.view(torch.int32).masked_fill(nans, 0)
    )


def varied(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values whose magnitude differs from block to block in every dimension."""
    x = torch.randn(shape)
    for dim, size in enumerate(shape):
        steps = torch.arange(size) // 40 * (dim + 1) % 7 - 3
        x = x * (2.0**steps).view([-1 if d == dim else 1 for d in range(len(shape))])
    return x.to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ------------------------------------------------------------------------------------------------------- casts


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_of_16_bits_becomes_the_nearest(dtype: torch.dtype, format: formats.Format) -> None:
    values = every(dtype).float()

    expected = torch.tensor([scalar.nearest(value, format.name) for value in values.tolist()], dtype=torch.uint8)
    assert torch.equal(bytes_of(formats.cast(values, format)), expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_floats_at_every_boundary_of_rounding_become_the_nearest(name: str) -> None:
    table = scalar.FINITE[name]
    ties = torch.tensor([(a + b) / 2 for a, b in pairwise(table)] + table)
    near = torch.cat([(ties.view(torch.int32) + ulps).view(torch.float32) for ulps in range(-2, 3)])
    near = near[near.isfinite()]
    values = torch.cat([near, -near])

    expected = torch.tensor([scalar.nearest(value, name) for value in values.tolist()], dtype=torch.uint8)
    codes = formats.cast_e2m1(values) if name == "e2m1" else bytes_of(formats.cast(values, FORMATS[name]))
    assert torch.equal(codes, expected)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
def test_conversions_saturate_and_keep_nan(format: formats.Format) -> None:
    values = torch.tensor([inf, -inf, nan, -nan, 3e38, format.max * 1.07, -0.0])

    most = int(bytes_of(torch.tensor(format.max).to(format.dtype)))
    assert bytes_of(formats.cast(values, format)).tolist() == [most, most + 128, 127, 127, most, most, 128]


# ------------------------------------------------------------------------------------------------------- scales


def transformer_engine_scales(amax: Tensor, power_of_two: bool, dtype: torch.dtype) -> Tensor:
    """Encode scales by TransformerEngine's published formula (tests/pytorch/references/quantize_scale_calc.py)."""
    scale = torch.div(448.0, amax)
    scale = torch.where(scale == inf, torch.finfo(dtype).max, scale)
    if power_of_two:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return torch.where(amax == 0, 1.0, scale)


def deep_gemm_scales(amax: Tensor) -> Tensor:
    """Decode scales by DeepGEMM's rule: the quotient's exponent rounded up (deep_gemm/utils/math.py)."""
    bits = (amax / 448.0).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


@both_scales
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_every_amax_are_those_of_transformer_engine(dtype: torch.dtype, power_of_two: bool) -> None:
    amax = every(dtype)[2**15 :]
    amax = amax[amax.isfinite()]

    _, scales = reference.quantize_blocks(amax.unsqueeze(1), (1,), power_of_two)

    encode = transformer_engine_scales(amax.float(), power_of_two, dtype)
    assert same_bits(scales.squeeze(1), 1 / encode)
    written_out = [scalar.scales_of(value, power_of_two, dtype)[1] for value in amax.tolist()]
    assert same_bits(scales.squeeze(1), torch.tensor(written_out))


def test_powers_of_two_are_those_of_deep_gemm() -> None:
    amax = every(torch.bfloat16)[2**15 :]
    amax = amax[(amax >= 1e-4) & (amax <= 1.4e38)]

    _, scales = reference.quantize_blocks(amax.unsqueeze(1), (1,), True)

    assert same_bits(scales.squeeze(1), deep_gemm_scales(amax.float()))


@both_scales
def test_small_and_large_floats_have_scales_that_are_finite(power_of_two: bool) -> None:
    amax = torch.tensor([1e-45, 1e-40, 1.2e-38, 1.3e-36, 3.4e38, torch.finfo(torch.float32).max])

    data, scales = reference.quantize_blocks(amax.unsqueeze(1), (1,), power_of_two)

    written_out = [scalar.block(value.unsqueeze(0), power_of_two) for value in amax]
    assert same_bits(scales.squeeze(1), torch.tensor([scale for _, scale in written_out]))
    assert torch.equal(bytes_of(data), torch.stack([codes for codes, _ in written_out]))
    assert scales.isfinite().all()


# ------------------------------------------------------------------------------------------------------- copies


@both_scales
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "features"), [(5, 128), (3, 300), (1, 16), (4, 260)])
def test_rows_are_those_of_the_rule(tokens: int, features: int, dtype: torch.dtype, power_of_two: bool) -> None:
    x = varied(tokens, features, dtype=dtype)

    rows = reference.quantize_rows(x, power_of_two)

    data, scales = scalar.rows(x, power_of_two)
    assert torch.equal(bytes_of(rows.data), data)
    assert same_bits(rows.scales[:, :tokens], scales)
    assert rows.scales.shape == (-(-features // 128), -(-tokens // 4) * 4)


def test_rows_in_e5m2_are_those_of_the_rule() -> None:
    x = varied(3, 200) * 1000

    data, scales = scalar.rows(x, True, "e5m2")
    rows = reference.quantize_rows(x, True, E5M2)

    assert torch.equal(bytes_of(rows.data), data)
    assert same_bits(rows.scales[:, :3], scales)


SIZES = [[5, 0, 128, 1], [0, 0], [129], [0, 300, 0], [1, 1, 1], [256, 128]]


@both_scales
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_columns_are_those_of_the_rule(sizes: list[int], power_of_two: bool) -> None:
    x = varied(sum(sizes) + 3, 9)

    columns = reference.quantize_columns(x, torch.tensor(sizes), power_of_two)

    assert columns.data.shape == (x.shape[0] // 128 + len(sizes), 9, 128)
    if sum(sizes):
        data, scales = scalar.columns(x, sizes, power_of_two)
        assert torch.equal(bytes_of(columns.data[: len(data)]), data)
        assert same_bits(columns.scales[: len(data)], scales)


def test_columns_of_512_groups_of_one_row() -> None:
    x = varied(512, 4)

    columns = reference.quantize_columns(x, torch.ones(512, dtype=torch.int32), True)

    data, scales = scalar.columns(x, [1] * 512, True)
    assert torch.equal(bytes_of(columns.data[:512]), data)
    assert same_bits(columns.scales[:512], scales)


def test_sizes_that_reach_past_the_rows_are_cut_off() -> None:
    x = varied(200, 4)

    cut = reference.quantize_columns(x, torch.tensor([150, 100, 7]), True)

    exact = reference.quantize_columns(x, torch.tensor([150, 50, 0]), True)
    assert torch.equal(bytes_of(cut.data[:3]), bytes_of(exact.data[:3]))


@both_scales
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("n", "k", "halves"), [(130, 260, 1), (260, 140, 2), (64, 16, 2), (20, 129, 1)])
def test_weights_are_those_of_the_rule(n: int, k: int, halves: int, dtype: torch.dtype, power_of_two: bool) -> None:
    weight = varied(2, n, k, dtype=dtype)

    copies = reference.quantize_weight(weight, halves, power_of_two)

    assert copies.scales.shape == (2, halves * -(-n // halves // 128), -(-k // 128))
    for expert in range(2):
        data, scales = scalar.weight(weight[expert], halves, power_of_two)
        assert torch.equal(bytes_of(copies.data[expert]), data)
        assert same_bits(copies.scales[expert], scales)


def test_the_transposed_weight_has_the_same_bytes() -> None:
    weight = varied(2, 130, 260)
    copy, transposed = Float8Block().weight(weight), Float8Block().transposed_weight(weight)

    assert copy.data.is_contiguous()
    assert transposed.data.is_contiguous()
    assert torch.equal(bytes_of(transposed.data), bytes_of(copy.data).mT)


def test_columns_of_rows_that_are_quantised_differ_by_underflow_only() -> None:
    """With powers of two a row's scale only moves its values' exponents, so a second scale rounds nothing again."""
    x, sizes = (torch.randn(300, 256) * torch.randn(300, 1).exp()).bfloat16(), torch.tensor([100, 0, 200])

    rows = reference.dequantize_rows(reference.quantize_rows(x, True))
    twice = reference.quantize_columns(rows.bfloat16(), sizes, True)
    values, step = reference.dequantize_columns(twice), 2.0**-9 * twice.scales.unsqueeze(-1)

    tokens = reference.token_blocks(sizes, 300)
    exact = torch.where(tokens.valid.unsqueeze(-1), rows[tokens.tokens], 0).transpose(1, 2)
    changed = values != exact
    assert 0 < changed.float().mean() < 0.01
    assert (exact.abs() < 8 * step)[changed].all()
    assert ((values - exact).abs() <= step / 2).all()


# -------------------------------------------------------------------------------- values that are not, and poison


@pytest.mark.parametrize("value", [inf, -inf, nan])
@both_scales
def test_a_value_that_is_not_finite_makes_the_scale_of_its_block_nan(value: float, power_of_two: bool) -> None:
    x = varied(140, 260)
    x[3, 130] = value

    rows = reference.quantize_rows(x, power_of_two)
    columns = reference.quantize_columns(x, torch.tensor([140]), power_of_two)
    weight = reference.quantize_weight(x.unsqueeze(0), 1, power_of_two)

    assert rows.scales.isnan().nonzero().tolist() == [[1, 3]]
    assert columns.scales[:2].isnan().nonzero().tolist() == [[0, 130]]
    assert weight.scales.isnan().nonzero().tolist() == [[0, 0, 1]]
    data, scales = scalar.rows(x[3:4], power_of_two)
    assert torch.equal(bytes_of(rows.data[3:4]), data)
    assert same_bits(rows.scales[:, 3:4], scales)


def test_a_block_of_zeros_has_scale_one() -> None:
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    x[:, 128:] = -0.0

    rows = reference.quantize_rows(x, False)

    assert bytes_of(rows.data).unique().tolist() == [0, 128]
    assert (rows.scales == 1).all()


def test_what_is_no_element_counts_for_no_scale() -> None:
    """The tail, the neighbours' rows, the rows of the other half and of the other expert are NaN."""
    x, sizes = varied(300, 130), torch.tensor([100, 0, 90])
    poisoned = x.clone()
    poisoned[:100] = nan
    poisoned[190:] = nan

    clean = reference.quantize_columns(x, sizes, True)
    dirty = reference.quantize_columns(poisoned, sizes, True)

    assert dirty.scales[0].isnan().all()
    assert torch.equal(bytes_of(dirty.data[1]), bytes_of(clean.data[1]))
    assert same_bits(dirty.scales[1:], clean.scales[1:])
    weight = varied(2, 260, 130)
    weight[0, 130:] = nan
    copies = reference.quantize_weight(weight, 2, True)
    assert copies.scales.isnan().flatten(2).any(2).tolist() == [[False, False, True, True], [False] * 4]


def test_rows_and_columns_of_nothing() -> None:
    nothing = torch.empty(0, 130, dtype=torch.bfloat16)

    assert reference.quantize_rows(nothing, True).scales.shape == (2, 0)
    assert reference.quantize_columns(nothing, torch.tensor([0, 0]), True).data.shape == (2, 130, 128)


# ------------------------------------------------------------------------------------------------------- dequantise


@both_scales
def test_values_come_back(power_of_two: bool) -> None:
    x = varied(6, 300)
    weight = varied(2, 260, 130)

    rows = reference.quantize_rows(x, power_of_two)
    copies = reference.quantize_weight(weight, 2, power_of_two)

    for token, feature in [(0, 0), (5, 299), (3, 128), (2, 127)]:
        expected = rows.data[token, feature].float() * rows.scales[feature // 128, token]
        assert reference.dequantize_rows(rows)[token, feature] == expected
    values = reference.dequantize_weight(copies, 2)
    for n, scale_row in [(0, 0), (128, 1), (129, 1), (130, 2), (257, 2), (258, 3)]:
        expected = copies.data[1, n, 129].float() * copies.scales[1, scale_row, 1]
        assert values[1, n, 129] == expected
    assert (reference.dequantize_rows(rows) - x.float()).norm() < 0.04 * x.float().norm()
    assert (values - weight.float()).norm() < 0.04 * weight.float().norm()


def test_powers_of_two_give_the_same_values_when_quantised_again() -> None:
    x = varied(50, 300)
    once = reference.dequantize_rows(reference.quantize_rows(x, True)).bfloat16()

    assert torch.equal(reference.dequantize_rows(reference.quantize_rows(once, True)), once.float())


def test_float32_scales_give_the_same_bytes_when_quantised_again() -> None:
    once = reference.quantize_rows(varied(50, 300), False)
    values = reference.dequantize_rows(once)

    assert torch.equal(bytes_of(reference.quantize_rows(values, False).data), bytes_of(once.data))


def test_powers_of_two_scale_through() -> None:
    x = varied(5, 300)

    plain, scaled = (reference.quantize_rows(each, True) for each in (x, x * 2.0**-20))

    assert torch.equal(bytes_of(plain.data), bytes_of(scaled.data))
    assert same_bits(plain.scales[:, :5] * 2.0**-20, scaled.scales[:, :5])


def test_some_rows_are_rows_of_the_whole() -> None:
    x = varied(9, 200)
    whole, part = reference.quantize_rows(x, False), reference.quantize_rows(x[3:7], False)

    cut = Rows(whole.data[3:7], whole.scales[:, 3:7])
    assert torch.equal(reference.dequantize_rows(cut), reference.dequantize_rows(part))
