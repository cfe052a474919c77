"""The CUDA kernels that pass over rows once, against PyTorch in float64; needs the built extension and its GPU."""

from __future__ import annotations

import pytest
import torch

from fusible.ops.activation_spec import activation, gated, interleaved
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.hopper import rows
from fusible.ops.kernels.problem import ActivationGrads
from fusible.ops.kernels.pytorch import activation as pointwise

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.device_refusal(torch.cuda.current_device()) is not None,
        reason="needs a Hopper GPU and the built extension",
    ),
]

T = 37
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
NAMES = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid")
SPECS = {
    **{name: activation(name) for name in NAMES},
    **{f"{name} glu": gated(name, None, 1.0, 0.0, "concat") for name in NAMES},
    "gpt-oss": gated("silu", 1.5, 1.702, 1.0, interleaved(1)),
    "blocks of 32": gated("silu", None, 1.0, 0.0, interleaved(32)),
    "blocks of 4": gated("gelu", 1.0, 1.0, 0.5, interleaved(4)),
}


def tensors(spec, dtype, columns, scales):
    wide = columns * (2 if spec.gated else 1)
    pre, dhidden = torch.randn(T, wide, device="cuda", dtype=dtype), torch.randn(T, columns, device="cuda", dtype=dtype)
    return pre, dhidden, None if scales is None else torch.rand(T, device="cuda", dtype=scales)


def grads_like(pre, dhidden, scales):
    poison = [None if t is None else torch.full_like(t, float("nan")) for t in (pre, scales, dhidden)]
    return ActivationGrads(*poison)


def assert_near(got, expected, dtype):
    torch.testing.assert_close(got.double(), expected, rtol=STEP[dtype], atol=8 * STEP[dtype])


@pytest.mark.parametrize("scales", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [8, 12, 768])
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_activation_and_its_backward(name, dtype, columns, scales):
    spec = SPECS[name]
    if spec.gated and columns % (spec.block or 1):
        pytest.skip("the columns do not divide into blocks")
    pre, dhidden, s = tensors(spec, dtype, columns, scales)
    hidden, grads = torch.full_like(dhidden, float("nan")), grads_like(pre, dhidden, s)
    rows.forward(pre, spec, s, hidden)
    rows.backward(dhidden, pre, spec, s, grads)

    exact = [None if t is None else t.double() for t in (pre, dhidden, s)]
    expected, truth = torch.empty_like(exact[1]), grads_like(*exact)
    pointwise.forward(exact[0], spec, exact[2], expected)
    pointwise.backward(exact[1], exact[0], spec, exact[2], truth)
    assert_near(hidden, expected, dtype)
    assert_near(grads.pre, truth.pre, dtype)
    assert_near(grads.hidden, truth.hidden, dtype)
    if s is not None:
        torch.testing.assert_close(grads.scales.double(), truth.scales, rtol=STEP[scales], atol=1e-3)


@pytest.mark.parametrize("name", SPECS)
def test_nan_stays_nan(name):
    pre, dhidden, _ = tensors(SPECS[name], torch.bfloat16, 64, None)
    pre[3] = float("nan")
    hidden = torch.empty_like(dhidden)
    rows.forward(pre, SPECS[name], None, hidden)

    assert hidden[3].isnan().all()
    assert hidden[[2, 4]].isfinite().all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 0], [37, 0, 0], [50, -9, 60], [2**31 - 1] * 3])
@pytest.mark.parametrize(("columns", "dtype"), [(64, torch.bfloat16), (3, torch.float16), (1, torch.float32)], ids=str)
def test_zero_tail_writes_the_tail_and_nothing_else(columns, dtype, sizes, index):
    out = torch.ones(T + 1, columns, device="cuda", dtype=dtype)
    rows.zero_tail(out[:T], torch.tensor(sizes, device="cuda", dtype=index))
    valid = min(T, sum(max(0, size) for size in sizes))

    assert out[:valid].eq(1).all()
    assert out[valid:T].eq(0).all()
    assert out[T].eq(1).all()


def test_results_are_the_same_from_run_to_run():
    spec = SPECS["silu glu"]
    pre, dhidden, s = tensors(spec, torch.bfloat16, 768, torch.float32)
    runs = [grads_like(pre, dhidden, s) for _ in range(2)]
    for grads in runs:
        rows.backward(dhidden, pre, spec, s, grads)

    assert all(torch.equal(a, b) for a, b in zip(*(grads[:3] for grads in runs), strict=True))


CHUNKED = [[300, 0, 700, 1, 256, 0], [0, 0, 0, 0, 0, 0], [1400, 0, 0, 0, 0, 0], [2000, -5, 2**31 - 1, 0, 0, 0]]


def by_group(sizes, rows):
    """Slices of the groups, cut off where the buffer ends."""
    start = 0
    for size in sizes:
        end = min(rows, start + max(0, size))
        yield slice(start, end)
        start = end


def ragged_rows(rows, columns, dtype, pitch, sizes):
    """Rows inside a wider buffer; NaN beside them and past the last group."""
    buffer = torch.full((rows, pitch), float("nan"), device="cuda", dtype=dtype)
    valid = min(rows, sum(max(0, size) for size in sizes))
    buffer[:valid, :columns] = torch.randn(valid, columns, device="cuda").to(dtype)
    return buffer[:, :columns]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", CHUNKED, ids=str)
@pytest.mark.parametrize(("columns", "pitch"), [(264, 264), (8, 16), (5, 7), (2880, 2880)])
@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_column_sums(dtype, columns, pitch, sizes, index, scaled):
    tokens = ragged_rows(1500, columns, dtype, pitch, sizes)
    scale = torch.rand(1500, device="cuda") if scaled else None
    if scaled:
        scale[sum(max(0, size) for size in sizes) :] = float("nan")
    splits = torch.tensor(sizes, device="cuda", dtype=index)
    sums = [torch.full((6, columns), float("nan"), device="cuda") for _ in range(2)]
    for out in sums:
        rows.column_sums(tokens, splits, out, scale)

    exact = tokens.double() if scale is None else tokens.double() * scale.double().unsqueeze(1)
    expected = torch.stack([exact[part].sum(0) for part in by_group(sizes, 1500)])
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-5, atol=1e-3)
    assert torch.equal(*sums)


@pytest.mark.parametrize("sizes", CHUNKED, ids=str)
@pytest.mark.parametrize(("columns", "pitch"), [(264, 264), (8, 16), (5, 7), (2880, 2880)])
@pytest.mark.parametrize("vectors", STEP, ids=str)
@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_row_dots(dtype, vectors, columns, pitch, sizes):
    tokens = ragged_rows(1500, columns, dtype, pitch, sizes)
    every = torch.randn(6, columns, device="cuda").to(vectors)
    dots = [torch.full((1500,), float("nan"), device="cuda") for _ in range(2)]
    for out in dots:
        rows.row_dots(tokens, every, torch.tensor(sizes, device="cuda"), out)

    expected = torch.zeros(1500, device="cuda", dtype=torch.float64)
    for g, part in enumerate(by_group(sizes, 1500)):
        expected[part] = tokens[part].double() @ every[g].double()
    torch.testing.assert_close(dots[0].double(), expected, rtol=1e-5, atol=1e-3)
    assert torch.equal(*dots)


@pytest.mark.parametrize("experts", [1, 65, 700])
def test_sums_of_any_number_of_groups(experts):
    tokens = torch.randn(1500, 64, device="cuda")
    sizes = torch.full((experts,), 1500 // experts, device="cuda")
    out, dots = torch.empty(experts, 64, device="cuda"), torch.empty(1500, device="cuda")
    rows.column_sums(tokens, sizes, out, None)
    rows.row_dots(tokens, out, sizes, dots)

    valid = 1500 // experts * experts
    truth = tokens[:valid].double().view(experts, -1, 64).sum(1)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-3)
    expected = (tokens[:valid].double().view(experts, -1, 64) * truth.unsqueeze(1)).sum(-1).flatten()
    torch.testing.assert_close(dots[:valid].double(), expected, rtol=1e-4, atol=1e-2)
    assert dots[valid:].eq(0).all()
