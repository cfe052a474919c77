"""The operands of a product as launches take them: each field is written here, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..extension import TYPE_CODES, address, stream
from ..problems.gemm import GroupedGemm, Layout, Matrices, OperandPair, first

LAYOUTS = {Layout.NT: 0, Layout.NN: 1, Layout.TN: 2}

Addressing = tuple[tuple[int, int, int], list[int]]
"""Where matrices lie: address, row pitch and distance of one tensor, in elements; or each at an address of its own."""

NO_MATRICES: Addressing = (0, 0, 0), []


def addressing(matrices: Matrices) -> Addressing:
    """The addresses and strides of matrices."""
    if isinstance(matrices, Tensor):
        strides = matrices.stride()
        return (matrices.data_ptr(), strides[-2], strides[0] if len(strides) == 3 else 0), []
    return (0, matrices[0].stride(0), 0), [matrix.data_ptr() for matrix in matrices]


def bias_addressing(bias: Matrices) -> Addressing:
    return ((bias.data_ptr(), bias.stride(0), 0), []) if isinstance(bias, Tensor) else addressing(bias)


def bias_fields(bias: Matrices | None, bias_scale: Tensor | None) -> dict[str, Any]:
    """The fields of a bias, whose scales are float32."""
    (data, pitch, _), listed = NO_MATRICES if bias is None else bias_addressing(bias)
    return {
        "bias": data,
        "bias_type": 0 if bias is None else TYPE_CODES[first(bias).dtype],
        "bias_pitch": pitch,
        "bias_addresses": listed,
        "bias_scale": address(bias_scale),
    }


def as_float32(factors: Tensor | None) -> Tensor | None:
    """Factors of rows or groups as kernels read them."""
    return None if factors is None else factors.to(torch.float32)


def one_or_each(factor: float | Tensor | None, groups: int) -> tuple[float, Tensor | None]:
    """A number for all groups, or one for each; 1 for None."""
    if isinstance(factor, Tensor) and (factor.is_cuda or factor.dim()):
        return 1.0, factor.to(torch.float32).expand(groups).contiguous()
    return 1.0 if factor is None else float(factor), None


def second_depth(problem: GroupedGemm) -> int:
    """R, the depth of the second pair of operands; 0 if there is none."""
    return 0 if problem.second is None else problem.second.a.shape[1]


def second_fields(second: OperandPair | None) -> dict[str, int]:
    """The extension's fields for the second pair of operands; empty if there is none."""
    if second is None:
        return {}
    a, b = second
    return {
        "second_k": a.shape[1],
        "second_a": a.data_ptr(),
        "second_a_pitch": a.stride(0),
        "second_b": b.data_ptr(),
        "second_b_pitch": b.stride(1),
        "second_b_group": b.stride(0),
    }


def product_fields(p: GroupedGemm, n: int) -> dict[str, Any]:
    """The fields of a launch for the stream, the product, its operands and groups, in their order."""
    device, sizes, ((first_weight, pitch, distance), listed) = p.a.get_device(), p.split_sizes, addressing(p.b)
    return {
        "layout": LAYOUTS[p.layout],
        "operand": TYPE_CODES[p.a.dtype],
        "device": device,
        "stream": stream(device),
        "groups": p.groups,
        "tokens": p.rows,
        "n": n,
        "k": 0 if p.layout is Layout.TN else p.a.shape[1],
        "a": p.a.data_ptr(),
        "a_pitch": p.a.stride(0),
        "b": first_weight,
        "b_pitch": pitch,
        "b_group": distance,
        "b_addresses": listed,
        "sizes": sizes.data_ptr(),
        "int64_sizes": sizes.dtype == torch.int64,
    }
