"""Checks of products of e4m3 operands that end in an activation, on a GPU or its emulation.

Their bytes are those of three kernels: the product, the activation, and the quantiser's definition.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fusible import check_device_errors
from fusible.ops.kernels.hopper import scaled_activation as hopper
from fusible.ops.kernels.hopper import scaled_gemm
from fusible.ops.kernels.problems.quantized import ActivatedScaledGemm, ScaledGemm

from .device import synchronize
from .quantize import activate, assert_rows, columns_of, rows_copy, spec_of
from .scaled import Case, bits, make_gemm


def make(
    device: str, case: Case, name: str, *, scales: torch.dtype | None = torch.float32, power_of_two: bool = True
) -> ActivatedScaledGemm:
    """A row is NaN, another one zero; what must not be read or written is poison."""
    product, _, _ = make_gemm(device, replace(case, factors=False))
    used = sum(case.sizes)
    if used > 3:
        product.a.scales[:, 1] = math.nan
        product.a.data.view(torch.uint8)[2] = 0
    product.fresh = True
    factors = None
    if scales is not None:
        factors = torch.full((len(product.out),), math.nan, device=device)
        factors[:used] = torch.rand(used, device=device) + 0.5
        factors = factors.to(scales)
    spec = spec_of(name)
    features = spec.out_features(case.n)
    copies, vectors = rows_copy(len(product.out), features, device), columns_of(spec, features, product.split_sizes)
    return ActivatedScaledGemm(product, spec, factors, power_of_two, copies, vectors)


def check_activation(device: str, case: Case, name: str, **asked: object) -> None:
    """The product, kept or not, and the rows."""
    problem = make(device, case, name, **asked)  # type: ignore[arg-type]
    used, product = sum(case.sizes), problem.product
    expected = _values(device, problem)
    assert hopper.refusal(problem) is None, hopper.refusal(problem)
    hopper.run(problem)
    synchronize(device)
    check_device_errors()
    assert torch.equal(bits(product.out), bits(expected)), "the product"
    postact = expected.new_empty(problem.rows.data.shape)
    read = problem.scales, problem.vectors
    activate(expected, problem.activation, *read, problem.product.split_sizes, postact)
    assert_rows(problem.rows, postact.cpu(), used, problem.power_of_two)
    _check_without_preact(device, problem)


def _values(device: str, problem: ActivatedScaledGemm) -> Tensor:
    """The product by the kernel that ends with it."""
    whole: ScaledGemm = replace(problem.product, out=torch.full_like(problem.product.out, math.nan))
    scaled_gemm.launch_gemm(whole)
    synchronize(device)
    return whole.out


def _check_without_preact(device: str, problem: ActivatedScaledGemm) -> None:
    copies = rows_copy(*problem.rows.data.shape, device)
    none_kept = replace(problem.product, out=problem.product.out[:0])
    hopper.run(replace(problem, product=none_kept, rows=copies))
    synchronize(device)
    for one, other in zip(copies[:2], problem.rows[:2], strict=True):
        assert torch.equal(bits(one), bits(other)), "the rows of a product that is not kept"
