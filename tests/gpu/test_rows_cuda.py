"""The CUDA kernels that pass over rows once, against PyTorch in float64; needs the built extension and its GPU."""

from __future__ import annotations

import pytest
import torch
from checks.device import needs_hopper
from checks.rows import (
    CHUNKED,
    SPECS,
    STEP,
    check_activation_and_its_backward,
    check_column_sums,
    check_nan_stays_nan,
    check_row_dots,
    check_zero_tail_writes_the_tail_and_nothing_else,
    grads_like,
    tensors,
)

from fusible.ops.kernels.hopper import rows

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]


@pytest.mark.parametrize("scales", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [8, 12, 768])
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_activation_and_its_backward(name, dtype, columns, scales):
    spec = SPECS[name]
    if spec.gated and columns % (spec.block or 1):
        pytest.skip("the columns do not divide into blocks")
    check_activation_and_its_backward("cuda", name, dtype, columns, scales)


@pytest.mark.parametrize("name", SPECS)
def test_nan_stays_nan(name):
    check_nan_stays_nan("cuda", name)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 0], [37, 0, 0], [50, -9, 60], [2**31 - 1] * 3])
@pytest.mark.parametrize(("columns", "dtype"), [(64, torch.bfloat16), (3, torch.float16), (1, torch.float32)], ids=str)
def test_zero_tail_writes_the_tail_and_nothing_else(columns, dtype, sizes, index):
    check_zero_tail_writes_the_tail_and_nothing_else("cuda", columns, dtype, sizes, index)


def test_results_are_the_same_from_run_to_run():
    spec = SPECS["silu glu"]
    preact, dpostact, s = tensors("cuda", spec, torch.bfloat16, 768, torch.float32)
    runs = [grads_like(preact, dpostact, s) for _ in range(2)]
    for grads in runs:
        rows.backward(dpostact, preact, spec, s, grads)

    assert all(torch.equal(a, b) for a, b in zip(*(grads[:3] for grads in runs), strict=True))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", CHUNKED, ids=str)
@pytest.mark.parametrize(("columns", "pitch"), [(264, 264), (8, 16), (5, 7), (2880, 2880)])
@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_column_sums(dtype, columns, pitch, sizes, index, scaled):
    check_column_sums("cuda", dtype, columns, pitch, sizes, index, scaled)


@pytest.mark.parametrize("sizes", CHUNKED, ids=str)
@pytest.mark.parametrize(("columns", "pitch"), [(264, 264), (8, 16), (5, 7), (2880, 2880)])
@pytest.mark.parametrize("vectors", STEP, ids=str)
@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_row_dots(dtype, vectors, columns, pitch, sizes):
    check_row_dots("cuda", dtype, vectors, columns, pitch, sizes)


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
