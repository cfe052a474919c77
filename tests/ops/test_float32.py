"""Warnings about float32 on a GPU."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from emulation import harness
from kernels_asked import runner

from fusible import config
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout
from fusible.ops.kernels.pytorch import float32, grouped_mm, loop
from fusible.ops.kernels.triton import installed

E, K, N, T = 2, 8, 8, 6
SIZES = torch.tensor([2, 4])


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of the CPU pass for those of a GPU; nothing is launched."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(grouped_mm, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(installed, "is_installed", lambda: False)  # it multiplies few rows of float32
    with harness.installed(object()):
        yield


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    float32.warn_once.cache_clear()
    yield
    float32.warn_once.cache_clear()


def said(dtype=torch.float32):
    """The warnings of two products."""
    x, weight, out = (torch.zeros(shape, dtype=dtype) for shape in ((T, K), (E, N, K), (T, N)))
    problem = GroupedGemm(Layout.NT, x, weight, SIZES, out, fresh=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = {runner(problem) for _ in range(2)}
    assert loop.run in chosen or not x.is_cuda
    return [str(warning.message) for warning in caught]


@pytest.mark.usefixtures("gpu")
def test_float32_warns_once_with_the_cure():
    (text,) = said()

    assert text.startswith("fusible: products of float32 run one expert after the other")
    for cure in ("bfloat16", "torch.autocast('cuda', torch.bfloat16)", "allow_tf32 = True", "config(strict=True)"):
        assert cure in text


@pytest.mark.usefixtures("gpu")
def test_who_asks_for_the_loop_or_float64_knows():
    with config(backend="loop"):
        assert not said()
    assert not said(torch.float64)


def test_a_cpu_has_no_faster_kernels_for_other_dtypes():
    assert not said()


@pytest.mark.usefixtures("gpu")
def test_who_allows_tf32_is_not_told_to(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    (text,) = said()

    assert "allow_tf32" not in text


@pytest.mark.parametrize("allowed", [True, False])
def test_the_switch_of_an_older_torch(allowed, monkeypatch):
    monkeypatch.setattr(
        torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=allowed)
    )  # which has no fp32_precision

    assert float32.allows_tf32() is allowed
