"""Checks of the kernels that pass over rows once, against PyTorch in float64, on a GPU or its emulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fusible import check_device_errors
from fusible.ops.kernels.hopper import rows
from fusible.ops.kernels.problems.gemm import ActivationGrads
from fusible.ops.kernels.pytorch import activation as pointwise
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

T = 37
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
NAMES = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid")
SPECS = {
    **{name: ActivationSpec(name) for name in NAMES},
    **{f"{name} glu": gated(name, None, 1.0, 0.0, "concat") for name in NAMES},
    "gpt-oss": gated("silu", 1.5, 1.702, 1.0, interleaved(1)),
    "blocks of 32": gated("silu", None, 1.0, 0.0, interleaved(32)),
    "blocks of 4": gated("gelu", 1.0, 1.0, 0.5, interleaved(4)),
}
CHUNKED = [[300, 0, 700, 1, 256, 0], [0, 0, 0, 0, 0, 0], [1400, 0, 0, 0, 0, 0], [2000, -5, 2**31 - 1, 0, 0, 0]]


def tensors(
    device: str, spec: ActivationSpec, dtype: torch.dtype, columns: int, scales: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pre-activations, gradients of the hidden rows, and scales."""
    wide = columns * (2 if spec.gated else 1)
    preact, dpostact = (
        torch.randn(T, wide, device=device, dtype=dtype),
        torch.randn(T, columns, device=device, dtype=dtype),
    )
    return preact, dpostact, None if scales is None else torch.rand(T, device=device, dtype=scales)


def grads_like(preact: Tensor, dpostact: Tensor, scales: Tensor | None) -> ActivationGrads:
    """NaN, for a backward to write over."""
    poison = [None if t is None else torch.full_like(t, float("nan")) for t in (preact, scales, dpostact)]
    return ActivationGrads(*poison)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=STEP[dtype], atol=8 * STEP[dtype])


def check_activation_and_its_backward(
    device: str, name: str, dtype: torch.dtype, columns: int, scales: torch.dtype | None
) -> None:
    spec = SPECS[name]
    preact, dpostact, s = tensors(device, spec, dtype, columns, scales)
    postact, grads = torch.full_like(dpostact, float("nan")), grads_like(preact, dpostact, s)
    rows.forward(preact, spec, s, postact)
    rows.backward(dpostact, preact, spec, s, grads)

    exact = [None if t is None else t.double() for t in (preact, dpostact, s)]
    expected, truth = torch.empty_like(exact[1]), grads_like(*exact)
    pointwise.forward(exact[0], spec, exact[2], expected)
    pointwise.backward(exact[1], exact[0], spec, exact[2], truth)
    assert_near(postact, expected, dtype)
    assert_near(grads.preact, truth.preact, dtype)
    assert_near(grads.postact, truth.postact, dtype)
    if s is not None:
        torch.testing.assert_close(grads.scales.double(), truth.scales, rtol=STEP[scales], atol=1e-3)


def check_nan_stays_nan(device: str, name: str) -> None:
    preact, dpostact, _ = tensors(device, SPECS[name], torch.bfloat16, 64, None)
    preact[3] = float("nan")
    postact = torch.empty_like(dpostact)
    rows.forward(preact, SPECS[name], None, postact)

    assert postact[3].isnan().all()
    assert postact[[2, 4]].isfinite().all()


def check_zero_tail_writes_the_tail_and_nothing_else(
    device: str, columns: int, dtype: torch.dtype, sizes: list[int], index: torch.dtype
) -> None:
    out = torch.ones(T + 1, columns, device=device, dtype=dtype)
    rows.zero_tail(out[:T], torch.tensor(sizes, device=device, dtype=index))
    valid = min(T, sum(max(0, size) for size in sizes))

    assert out[:valid].eq(1).all()
    assert out[valid:T].eq(0).all()
    assert out[T].eq(1).all()
    wrong = min(sizes) < 0 or sum(sizes) > T
    with pytest.raises(RuntimeError, match="split_sizes on the device") if wrong else nullcontext():
        check_device_errors(0)


def by_group(sizes: list[int], rows: int) -> Iterator[slice]:
    """Slices of the groups, cut off where the buffer ends."""
    start = 0
    for size in sizes:
        end = min(rows, start + max(0, size))
        yield slice(start, end)
        start = end


def ragged_rows(device: str, rows: int, columns: int, dtype: torch.dtype, pitch: int, sizes: list[int]) -> Tensor:
    """Rows inside a wider buffer; NaN beside them and past the last group."""
    buffer = torch.full((rows, pitch), float("nan"), device=device, dtype=dtype)
    valid = min(rows, sum(max(0, size) for size in sizes))
    buffer[:valid, :columns] = torch.randn(valid, columns, device=device).to(dtype)
    return buffer[:, :columns]


def check_column_sums(
    device: str, dtype: torch.dtype, columns: int, pitch: int, sizes: list[int], index: torch.dtype, scaled: bool
) -> None:
    tokens = ragged_rows(device, 1500, columns, dtype, pitch, sizes)
    scale = torch.rand(1500, device=device) if scaled else None
    if scaled:
        scale[sum(max(0, size) for size in sizes) :] = float("nan")
    splits = torch.tensor(sizes, device=device, dtype=index)
    sums = [torch.full((len(sizes), columns), float("nan"), device=device) for _ in range(2)]
    for out in sums:
        rows.column_sums(tokens, splits, out, scale)

    exact = tokens.double() if scale is None else tokens.double() * scale.double().unsqueeze(1)
    expected = torch.stack([exact[part].sum(0) for part in by_group(sizes, 1500)])
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-5, atol=1e-3)
    assert torch.equal(*sums)


def check_row_dots(
    device: str, dtype: torch.dtype, vectors: torch.dtype, columns: int, pitch: int, sizes: list[int]
) -> None:
    tokens = ragged_rows(device, 1500, columns, dtype, pitch, sizes)
    every = torch.randn(len(sizes), columns, device=device).to(vectors)
    dots = [torch.full((1500,), float("nan"), device=device) for _ in range(2)]
    for out in dots:
        rows.row_dots(tokens, every, torch.tensor(sizes, device=device), out)

    expected = torch.zeros(1500, device=device, dtype=torch.float64)
    for g, part in enumerate(by_group(sizes, 1500)):
        expected[part] = tokens[part].double() @ every[g].double()
    torch.testing.assert_close(dots[0].double(), expected, rtol=1e-5, atol=1e-3)
    assert torch.equal(*dots)
