"""Products of a few rows and weights of 8 or 4 bits, which our own kernel decodes in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.copies import PackedFormat
from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream
from ..problems.gemm import addresses
from ..problems.quantized import PackedGemm
from .gemm import MAX_GROUPS, MAX_ROWS
from .operands import as_float32

NAME = "hopper"
_CODES = {PackedFormat.MXFP8: 0, PackedFormat.NVFP4: 1, PackedFormat.MXFP4: 2}
_VALUES_OF_16_BYTES = {PackedFormat.MXFP8: 16, PackedFormat.NVFP4: 32, PackedFormat.MXFP4: 32}


def refusal(p: PackedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    if (why := hardware_refusal(p.a)) is not None:
        return f"{NAME} {why}"
    return _shape_refusal(p) or _layout_refusal(p)


def _shape_refusal(p: PackedGemm) -> str | None:
    _, _, k = p.mnk
    if k % _VALUES_OF_16_BYTES[p.format]:
        return f"{NAME} needs rows of packed weights that are multiples of 16 bytes, got a depth of {k}"
    if not 1 <= p.groups <= MAX_GROUPS or p.rows > MAX_ROWS:
        return f"{NAME} takes at most {MAX_GROUPS} groups and {MAX_ROWS} rows, got {p.groups} and {p.rows}"
    if p.a.dtype != torch.bfloat16 or p.out.dtype not in TYPE_CODES:
        return f"{NAME} multiplies bfloat16, got {p.a.dtype} to {p.out.dtype}"
    return None


def _layout_refusal(p: PackedGemm) -> str | None:
    sizes = p.split_sizes
    if sizes.dtype not in (torch.int32, torch.int64) or not sizes.is_contiguous():
        return f"{NAME} needs contiguous int32 or int64 split sizes"
    if p.a.stride(-1) != 1 or p.a.stride(0) % 8 or addresses(p.a)[0] % 16 or p.out.stride(-1) != 1:
        return f"{NAME} needs dense rows that are aligned to 16 bytes, got strides {list(p.a.stride())}"
    if (
        not p.data.is_contiguous()
        or not p.scales.is_contiguous()
        or addresses(p.data)[0] % 16
        or addresses(p.scales)[0] % 2
    ):
        return f"{NAME} needs contiguous weights and scales, aligned to 16 bytes"
    return None


def run(p: PackedGemm) -> None:
    """One launch on the current stream."""
    (tokens, n, k), device = p.mnk, p.a.get_device()
    bias = None if p.bias is None else _readable(p.bias)
    vectors = map(as_float32, p.factors)
    bias_scale, row_scale, alphas = [None if each is None else each.contiguous() for each in vectors]
    compiled().packed_gemm(
        device=device,
        stream=stream(device),
        format=_CODES[p.format],
        tokens=tokens,
        n=n,
        k=k,
        a=p.a.data_ptr(),
        a_pitch=p.a.stride(0),
        b=p.data.data_ptr(),
        b_scales=p.scales.data_ptr(),
        groups=p.groups,
        sizes=p.split_sizes.data_ptr(),
        int64_sizes=p.split_sizes.dtype == torch.int64,
        output=TYPE_CODES[p.out.dtype],
        out=p.out.data_ptr(),
        out_pitch=p.out.stride(0),
        bias=address(bias),
        bias_type=0 if bias is None else TYPE_CODES[bias.dtype],
        bias_scale=address(bias_scale),
        row_scale=address(row_scale),
        alphas=address(alphas),
        zero_tail=p.fresh,
    )
    if not p.fresh:
        torch.autograd.graph.increment_version(p.out)


def _readable(bias: Tensor) -> Tensor:
    return (bias if bias.dtype in TYPE_CODES else bias.float()).contiguous()
