"""One scale for a row, and one for a group, now or delayed: bit for bit against the rule written out."""

from __future__ import annotations

from math import inf, nan

import pytest
import scalar_quantisers as scalar
import torch
from torch import Tensor

from fusible import Delayed
from fusible.ops.formats import per_row, per_tensor
from fusible.ops.formats.formats import E5M2, FORMATS
from fusible.ops.formats.per_tensor import DelayedScales
from fusible.ops.formats.reference import Blocks

both_scales = pytest.mark.parametrize("power_of_two", [True, False], ids=["pow2", "float32"])
SIZES = [70, 0, 130, 1]
TOKENS, K = 205, 20


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rows() -> Tensor:
    """Rows whose magnitudes differ by row and by column."""
    magnitudes = torch.randn(TOKENS, 1).exp() * torch.randn(K).exp()
    return (torch.randn(TOKENS, K) * magnitudes).bfloat16()


def bytes_of(data: Tensor) -> Tensor:
    return data.view(torch.uint8)


def starts() -> list[tuple[int, int, int]]:
    """The group, the first token and the end of each block of 128."""
    blocks, start = [], 0
    for group, size in enumerate(SIZES):
        blocks += [(group, first, min(first + 128, start + size)) for first in range(start, start + size, 128)]
        start += size
    return blocks


def of_group(x: Tensor, group: int) -> Tensor:
    return x[sum(SIZES[:group]) : sum(SIZES[: group + 1])]


@both_scales
def test_rows_have_a_scale_each(power_of_two: bool) -> None:
    x = rows()

    quantised = per_row.quantize_rows(x, power_of_two)

    expected = [scalar.block(row, power_of_two) for row in x]
    assert torch.equal(bytes_of(quantised.data), torch.stack([codes for codes, _ in expected]))
    assert torch.equal(quantised.scales, torch.tensor([scale for _, scale in expected]))
    assert (per_row.dequantize_rows(quantised) - x.float()).norm() < 0.04 * x.float().norm()


@both_scales
def test_columns_have_a_scale_for_each_group(power_of_two: bool) -> None:
    x, sizes = rows(), torch.tensor(SIZES)

    quantised = per_row.quantize_columns(x, sizes, power_of_two)
    values = per_row.dequantize_columns(quantised, sizes, TOKENS)

    for block, (group, first, end) in enumerate(starts()):
        for k in range(K):
            codes, scale = scalar.block(of_group(x, group)[:, k], power_of_two)
            within = slice(first - sum(SIZES[:group]), end - sum(SIZES[:group]))
            assert bytes_of(quantised.data)[block, k, : end - first].tolist() == codes[within].tolist()
            assert quantised.scales[group, k] == scale
        assert (bytes_of(quantised.data)[block, :, end - first :] == 0).all()
        part = x[first:end].float().t()
        assert (values[block, :, : end - first] - part).norm() < 0.04 * part.norm()
    assert (quantised.scales[1] == 1).all()


def test_the_copies_of_a_weight_are_two_quantisations() -> None:
    weight = (torch.randn(2, 20, 30) * torch.randn(30).exp()).bfloat16()

    copies = per_row.quantize_weight(weight, True)

    assert torch.equal(copies.scales, torch.tensor([[scalar.block(row, True)[1] for row in one] for one in weight]))
    values = per_row.dequantize_rows(Blocks(copies.transposed, copies.transposed_scales)).mT
    assert (values - weight.float()).norm() < 0.04 * weight.float().norm()
    assert copies.transposed_scales.shape == (2, 30)


@both_scales
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_a_group_has_one_scale(name: str, power_of_two: bool) -> None:
    x, sizes = rows(), torch.tensor(SIZES)
    x[-1] = nan  # of the tail

    quantised = per_tensor.quantize_rows(x, sizes, power_of_two, FORMATS[name])

    for group in range(len(SIZES)):
        codes, scale = scalar.block(of_group(x, group), power_of_two, name)
        assert torch.equal(of_group(bytes_of(quantised.data), group), codes)
        assert quantised.scales[group] == scale
    values = per_tensor.dequantize_rows(quantised, sizes)
    assert (values[:201] - x[:201].float()).norm() < 0.08 * x[:201].float().norm()
    assert (values[201:] == 0).all()


def test_the_transposed_rows_have_the_same_bytes() -> None:
    sizes = torch.tensor(SIZES)
    quantised = per_tensor.quantize_rows(rows(), sizes, True)

    transposed = per_tensor.transposed_rows(quantised, sizes)

    for block, (_, first, end) in enumerate(starts()):
        assert torch.equal(bytes_of(transposed)[block, :, : end - first], bytes_of(quantised.data)[first:end].t())
        assert (bytes_of(transposed)[block, :, end - first :] == 0).all()


def test_a_matrix_has_one_scale() -> None:
    weight = torch.randn(3, 20, 30)

    copies = per_tensor.quantize_weight(weight, False)

    expected = [scalar.block(one, False) for one in weight]
    assert torch.equal(bytes_of(copies.data), torch.stack([codes for codes, _ in expected]))
    assert torch.equal(copies.scales, torch.tensor([scale for _, scale in expected]))
    assert (per_tensor.dequantize_weight(copies) - weight).norm() < 0.04 * weight.norm()


def test_a_value_that_is_not_finite_spoils_its_own_scale_only() -> None:
    x, sizes = rows(), torch.tensor(SIZES)
    x[75, 3] = nan
    x[3, 2] = -inf

    assert per_row.quantize_rows(x, True).scales.isnan().nonzero().flatten().tolist() == [3, 75]
    assert per_row.quantize_columns(x, sizes, True).scales.isnan().nonzero().tolist() == [[0, 2], [2, 3]]
    assert per_tensor.quantize_rows(x, sizes, True).scales.isnan().tolist() == [True, False, True, False]


# ------------------------------------------------------------------------------------------------------- delayed


def transformer_engine_update(history: list[float], scale: float, most: float) -> tuple[list[float], float]:
    """One tensor's update of TransformerEngine's kernel (common/recipe/delayed_scaling.cu), for the largest amax."""
    amax = max(history)
    scale = scalar.float32(most / amax) if 0 < amax < inf else scale
    rolled = [*history[1:], history[0]]
    return [0.0, *rolled[1:]], min(scale, float(torch.finfo(torch.float32).max))


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("history", [1, 3])
def test_delayed_scales_are_those_of_transformer_engine(history: int, margin: int) -> None:
    delayed = Delayed(history, margin)
    amaxes = [3.0, 0.5, 100.0, 0.0, 0.25, inf, 1e-45, 0.0, 7.0, 0.0, 0.0, 0.0, 0.0, 1e-42, 0.0]
    state, past, scale = DelayedScales.first(2, delayed), [0.0] * history, 1.0

    for amax in amaxes:
        state = state.seen(torch.tensor([amax, 1.0])).seen(torch.tensor([amax / 2, 1.0])).next(delayed)

        past[0] = scalar.float32(amax)
        past, scale = transformer_engine_update(past, scale, 448 / 2**margin)
        assert state.history[:, 0].tolist() == past
        assert state.encode[0] == scale
        assert state.encode[1] == 448 / 2**margin


def test_a_tensor_is_quantised_with_the_scales_of_the_steps_before() -> None:
    x, sizes, delayed = rows(), torch.tensor(SIZES), Delayed(4)
    state = DelayedScales.first(4, delayed)
    state = state.seen(per_tensor.amax_by_group(x, sizes)).next(delayed, E5M2, is_power_of_two=True)

    now = per_tensor.quantize_rows(x, sizes, True, E5M2)
    then = per_tensor.quantize_rows(x, sizes, True, E5M2, encode=state.encode)

    assert torch.equal(bytes_of(now.data)[:201], bytes_of(then.data)[:201])
    assert torch.equal(now.scales, then.scales)
    larger = per_tensor.quantize_rows(x * 1024, sizes, True, E5M2, encode=state.encode)
    assert torch.equal(larger.scales, now.scales)
    assert larger.data[:201].float().abs().max() == 57344
