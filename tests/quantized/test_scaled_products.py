"""Products of quantised operands in PyTorch: against float64, group by group, with the tails of the loop backend."""

from __future__ import annotations

from math import nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusible.ops.formats import reference
from fusible.ops.formats.copies import BLOCK, Columns, Rows
from fusible.ops.formats.formats import E4M3
from fusible.ops.kernels.problems.quantized import (
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizedWeight,
    QuantizeRows,
    QuantizeWeight,
    ScaledGemm,
    ScaledWgrad,
)
from fusible.ops.kernels.pytorch import quantize as quantizers
from fusible.ops.kernels.pytorch import scaled_gemm as products
from fusible.ops.values.activation_spec import ActivationSpec

SIZES = [[70, 0, 130, 1], [0, 0], [5], [300, 129]]
K, N = 260, 280


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory in which every float, of whatever type, is NaN."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), 0x7F, dtype=torch.uint8).view(dtype).view(shape).fill_(nan)


def new_rows(tokens: int, features: int) -> Rows:
    scales = memory(-(-features // BLOCK), -(-tokens // 4) * 4)
    return Rows(memory(tokens, features, dtype=E4M3.dtype), scales)


def new_columns(tokens: int, features: int, groups: int) -> Columns:
    blocks = tokens // BLOCK + groups
    return Columns(memory(blocks, features, BLOCK, dtype=E4M3.dtype), memory(blocks, features))


def copies_of(x: Tensor, sizes: Tensor, power_of_two: bool = True) -> tuple[Rows, Columns]:
    copies = new_rows(*x.shape), new_columns(*x.shape, len(sizes))
    quantizers.run(QuantizeRows(x, sizes, power_of_two, *copies))
    return copies


def weight_of(weight: Tensor, halves: int = 1, power_of_two: bool = True) -> QuantizedWeight:
    groups, n, k = weight.shape
    data, transposed = memory(groups, n, k, dtype=E4M3.dtype), memory(groups, k, n, dtype=E4M3.dtype)
    scales = memory(groups, halves * -(-n // halves // BLOCK), -(-k // BLOCK))
    copies = QuantizedWeight(data, transposed, scales)
    quantizers.run(QuantizeWeight(weight, halves, power_of_two, copies))
    return copies


def rows(sizes: list[int], tail: int = 3, features: int = K) -> Tensor:
    return torch.randn(sum(sizes) + tail, features).bfloat16()


def forward(a: Rows, b: QuantizedWeight, sizes: Tensor, halves: int = 1, **extras: Tensor) -> Tensor:
    out = torch.full((a.data.shape[0], b.data.shape[1]), 7.0)
    products.run(ScaledGemm(a, b.data, b.scales, halves, sizes, out, **extras))
    return out


def exact(a: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
    """Group by group in float64; the rows of all groups."""
    parts = zip(a[: sum(sizes)].double().split(sizes), b.double(), strict=True)
    return torch.cat([part @ matrix.t() for part, matrix in parts])


def is_near(value: Tensor, expected: Tensor, of_exact: Tensor) -> bool:
    """Within float32's rounding of the sum of the magnitudes."""
    return bool(((value.double() - expected).abs() <= 1e-5 * of_exact + 1e-30).all())


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("halves", [1, 2])
def test_rows_times_weights(sizes: list[int], halves: int, power_of_two: bool) -> None:
    x, on_device = rows(sizes), torch.tensor(sizes)
    a, _ = copies_of(x, on_device, power_of_two)
    weight = weight_of(torch.randn(len(sizes), N, K).bfloat16(), halves, power_of_two)

    out = forward(a, weight, on_device, halves)

    left, right = reference.dequantize_rows(a), reference.dequantize_weight(weight, halves)
    assert is_near(out[: sum(sizes)], exact(left, right, sizes), exact(left.abs(), right.abs(), sizes))
    assert (out[sum(sizes) :] == 7).all()


def test_the_gradient_of_rows_reads_the_transposed_weight() -> None:
    sizes = SIZES[0]
    dy, on_device = rows(sizes, features=N), torch.tensor(sizes, dtype=torch.int32)
    a, _ = copies_of(dy, on_device)
    weight = weight_of(torch.randn(4, N, K) * torch.tensor([1.0, 30.0]).repeat_interleave(130)[:K])
    assert weight.transposed is not None
    out = torch.empty(dy.shape[0], K, dtype=torch.bfloat16)

    products.run(ScaledGemm(a, weight.transposed, weight.scales.mT, 1, on_device, out, fresh=True))

    left, right = reference.dequantize_rows(a), reference.dequantize_weight(weight, 1).mT
    torch.testing.assert_close(out[: sum(sizes)].double(), exact(left, right, sizes), rtol=2**-8, atol=1e-3)
    assert (out[sum(sizes) :] == 0).all()


def test_factors_and_bias_follow_as_in_a_product_of_16_bits() -> None:
    sizes = SIZES[0]
    x, on_device, rows_of = rows(sizes), torch.tensor(sizes), sum(sizes)
    a, _ = copies_of(x, on_device)
    weight = weight_of(torch.randn(4, N, K).bfloat16())
    extras = {
        "bias": torch.randn(4, N),
        "row_scale": torch.rand(x.shape[0]),
        "alpha": torch.rand(4),
        "bias_scale": torch.rand(x.shape[0]),
    }

    out = forward(a, weight, on_device, **extras)

    group = torch.arange(4).repeat_interleave(on_device)
    product = exact(reference.dequantize_rows(a), reference.dequantize_weight(weight, 1), sizes)
    bias = extras["bias"][group] * extras["bias_scale"][:rows_of, None]
    expected = extras["row_scale"][:rows_of, None] * (extras["alpha"][group, None] * product + bias)
    torch.testing.assert_close(out[:rows_of].double(), expected.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("separate", [False, True])
def test_weight_gradients(sizes: list[int], accumulate: bool, separate: bool) -> None:
    x, dy, on_device = rows(sizes), rows(sizes, features=N), torch.tensor(sizes)
    (_, b), (_, a) = copies_of(x, on_device), copies_of(dy, on_device)
    before = torch.randn(len(sizes), N, K)
    out = list(before.clone()) if separate else before.clone()

    products.run(ScaledWgrad(a, b, on_device, x.shape[0], out, accumulate))

    first = 0
    for group, size in enumerate(sizes):
        used = slice(first, first + -(-size // 128))
        left, right = (
            reference.dequantize_columns(Columns(*(part[used] for part in copy[:2]))).double() for copy in (a, b)
        )
        product = torch.einsum("bmt,bnt->mn", left, right)
        expected = product + before[group] if accumulate else product
        magnitude = torch.einsum("bmt,bnt->mn", left.abs(), right.abs()) + before[group].abs()
        assert is_near(out[group], expected, magnitude)
        first = used.stop
        if not size and not accumulate:
            assert (out[group] == 0).all()


def test_what_no_group_owns_counts_for_nothing() -> None:
    """NaN in the tail, in unused blocks and in the memory of every copy."""
    sizes = [70, 0, 130]
    x, dy, on_device = rows(sizes, 90), rows(sizes, 90, N), torch.tensor(sizes)
    x[200:] = nan
    dy[200:] = nan
    (a, b), (_, c) = copies_of(x, on_device), copies_of(dy, on_device)
    for copy in (b, c):
        copy.data.view(torch.uint8)[3:] = 127
        copy.scales[3:] = nan
    weight = weight_of(torch.randn(3, N, K))
    out = torch.full((3, N, K), nan)

    y = forward(a, weight, on_device)
    products.run(ScaledWgrad(c, b, on_device, x.shape[0], out))

    assert y[:200].isfinite().all()
    assert (y[200:] == 7).all()
    assert out.isfinite().all()
    assert (out[1] == 0).all()


def test_a_value_that_is_not_finite_stays_in_its_group() -> None:
    sizes = [70, 60]
    x, on_device = rows(sizes), torch.tensor(sizes)
    x[3, 5] = nan
    (a, b), weight = copies_of(x, on_device), weight_of(torch.randn(2, N, K))
    out = torch.empty(2, K, K)

    y = forward(a, weight, on_device)
    products.run(ScaledWgrad(b, b, on_device, x.shape[0], out))

    assert y.isnan().nonzero()[:, 0].unique().tolist() == [3]
    assert out[0, 5].isnan().all()
    assert out[1].isfinite().all()
    assert not out[0, 6, :5].isnan().any()


# ------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_an_activation_is_rounded_before_it_is_quantised(name: str, scaled: bool) -> None:
    sizes = torch.tensor([70, 60])
    spec = ActivationSpec("silu", gated=True) if name == "swiglu" else ActivationSpec("gelu")
    preact = torch.randn(135, 2 * K).bfloat16()
    scales = torch.rand(135) if scaled else None
    features = spec.out_features(2 * K)
    copies = new_rows(135, features), new_columns(135, features, 2)

    quantizers.run(QuantizeActivation(preact, sizes, spec, scales, True, *copies))

    wide = preact.float()
    gate, up = wide.chunk(2, 1)
    value = torch.nn.functional.silu(gate) * up if spec.gated else torch.nn.functional.gelu(wide)
    hidden = (value if scales is None else value * scales[:, None]).bfloat16()
    expected = copies_of(hidden, sizes)
    assert torch.equal(reference.dequantize_rows(copies[0])[:130], reference.dequantize_rows(expected[0])[:130])
    assert torch.equal(copies[1].data[:2].view(torch.uint8), expected[1].data[:2].view(torch.uint8))


def test_the_backward_of_an_activation_quantises_what_autograd_gives() -> None:
    sizes, spec = torch.tensor([70, 60]), ActivationSpec("silu", gated=True)
    preact = torch.randn(135, 2 * K).bfloat16()
    dpostact, scales = torch.randn(135, K).bfloat16(), torch.rand(135)
    copies, postact, dscales = (new_rows(135, 2 * K), new_columns(135, 2 * K, 2)), new_columns(135, K, 2), memory(135)

    quantizers.run(QuantizeActivationBackward(dpostact, preact, sizes, spec, scales, True, *copies, postact, dscales))

    wide, factor = preact.float().requires_grad_(), scales.clone().requires_grad_()
    gate, up = wide.chunk(2, 1)
    hidden = torch.nn.functional.silu(gate) * up * factor[:, None]
    hidden.backward(dpostact.float())
    assert wide.grad is not None
    assert factor.grad is not None
    difference = reference.dequantize_rows(copies[0])[:130] - wide.grad[:130]
    assert difference.norm() < 0.04 * wide.grad[:130].norm()
    expected = copies_of(hidden.detach().bfloat16(), sizes)[1]
    assert torch.equal(postact.scales[:2], expected.scales[:2])
    torch.testing.assert_close(dscales[:130], factor.grad[:130], rtol=1e-5, atol=1e-4)
    assert (dscales[130:] == 0).all()


# ------------------------------------------------------------------------------------------- how large errors are


def data(kind: str, *shape: int) -> Tensor:
    """Normal; with some channels thirty times as large; with heavy tails."""
    x = torch.randn(shape)
    if kind == "outliers":
        x[..., torch.randperm(shape[-1])[:4]] *= 30
    return torch.distributions.StudentT(3.0).sample(torch.Size(shape)) if kind == "heavy" else x


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("kind", ["normal", "outliers", "heavy"])
def test_errors_against_exact_products(kind: str, power_of_two: bool) -> None:
    sizes = [150, 106]
    on_device = torch.tensor(sizes)
    x, dy = data(kind, 256, 512).bfloat16(), data("normal", 256, 384).bfloat16()
    weight = torch.randn(2, 384, 512).bfloat16()
    (a, b), (da, db) = copies_of(x, on_device, power_of_two), copies_of(dy, on_device, power_of_two)
    copies = weight_of(weight, 1, power_of_two)
    assert copies.transposed is not None
    dweight, dx = torch.empty(2, 384, 512), torch.empty(256, 512)

    y = forward(a, copies, on_device)
    products.run(ScaledGemm(da, copies.transposed, copies.scales.mT, 1, on_device, dx))
    products.run(ScaledWgrad(db, b, on_device, 256, dweight))

    parts = zip(dy.double().split(sizes), x.double().split(sizes), strict=True)
    assert relative(y, exact(x, weight, sizes)) < 0.05
    assert relative(dx, exact(dy, weight.mT, sizes)) < 0.05
    assert relative(dweight, torch.stack([left.t() @ right for left, right in parts])) < 0.05


# ------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    exponent=st.integers(-12, 12),
    tail=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_what_holds_of_every_product(sizes: list[int], exponent: int, tail: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, on_device = rows(sizes, 0, 144), torch.tensor(sizes)
    weight = weight_of(torch.randn(len(sizes), 24, 144))
    longer = torch.cat([x, torch.full((tail, 144), nan, dtype=x.dtype)])

    y = forward(copies_of(x, on_device)[0], weight, on_device)

    scaled = forward(copies_of(x * 2.0**exponent, on_device)[0], weight, on_device)
    assert torch.equal(scaled, y * 2.0**exponent)
    assert torch.equal(forward(copies_of(longer, on_device)[0], weight, on_device)[: len(y)], y)
    assert torch.equal(forward(copies_of(x, on_device)[0], weight, on_device), y)
    flipped = torch.cat(x.split(sizes)[::-1])
    turned = QuantizedWeight(weight.data.flip(0), None, weight.scales.flip(0))
    z = forward(copies_of(flipped, on_device.flip(0))[0], turned, on_device.flip(0))
    assert torch.equal(torch.cat(z.split(sizes[::-1])[::-1]), y)
