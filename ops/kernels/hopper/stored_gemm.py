"""Products of rows and MXFP4 weights as they are stored, whose bytes our own kernel decodes in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..extension import TYPE_CODES, address, compiled, hardware_refusal, workspace_bytes
from ..problems.gemm import GroupedGemm, Layout, addresses, first
from ..problems.quantized import StoredGemm
from .gemm import MAX_GROUPS, MAX_ROWS, layout_refusal, second_refusal, vectors_refusal
from .operands import as_float32, bias_fields, product_fields, second_depth, second_fields

NAME = "hopper"
MOST_RANK = 64
"""The depth of a second pair of operands, at most."""
_STEP = 64  # values of a stage


def refusal(p: StoredGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    product, data = p.product, p.product.b
    assert isinstance(data, Tensor)
    why = weight_refusal(product.a, data, p.scales, second_depth(product)) or _terms_refusal(product)
    return why or layout_refusal(a=product.a, out=product.out) or second_refusal(product)


def weight_refusal(rows: Tensor, data: Tensor, scales: Tensor, rank: int) -> str | None:
    """Why rows like these are not multiplied by a stored weight and factors of this rank; None: they are."""
    groups, out_features, in_features = *data.shape[:2], data.shape[2] * 2
    if (why := hardware_refusal(rows)) is not None:
        return why
    if rows.dtype != torch.bfloat16:
        return f"multiplies bfloat16, got {rows.dtype}"
    if not 1 <= groups <= MAX_GROUPS or rows.shape[0] > MAX_ROWS:
        return f"takes at most {MAX_GROUPS} groups and {MAX_ROWS} rows, got {groups} and {rows.shape[0]}"
    if in_features % _STEP or out_features % 8:
        return f"needs in_features that are multiples of {_STEP}, got {in_features}, and out_features of 8"
    if not data.is_contiguous() or not scales.is_contiguous() or addresses(data)[0] % 16 or addresses(scales)[0] % 2:
        return "needs dense weights and scales, aligned to 16 bytes"
    return None if rank <= MOST_RANK else f"adds a product of rank {MOST_RANK} at most, got {rank}"


def _terms_refusal(p: GroupedGemm) -> str | None:
    terms = p.bias, p.bias_scale, p.row_scale
    if p.alpha is not None or p.beta is not None or (p.layout is Layout.NN and any(t is not None for t in terms)):
        return "takes bias and factors of rows in a forward alone"
    if p.bias is not None and first(p.bias).dtype not in TYPE_CODES:
        return f"needs a bias of 16 or 32 bits, got {first(p.bias).dtype}"
    if first(p.out).dtype != torch.bfloat16:
        return f"gives bfloat16, not {first(p.out).dtype}"
    if p.split_sizes.dtype not in (torch.int32, torch.int64) or not p.split_sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    return vectors_refusal(p.a.device, bias=p.bias, bias_scale=p.bias_scale, row_scale=p.row_scale)


def run(problem: StoredGemm) -> None:
    """One launch on the current stream."""
    p = problem.product
    out, bias_scale, row_scale = first(p.out), as_float32(p.bias_scale), as_float32(p.row_scale)
    workspace = p.a.new_empty(workspace_bytes(p.groups), dtype=torch.uint8)
    compiled().stored_gemm(
        **product_fields(p, out.shape[-1]),
        b_scales=problem.scales.data_ptr(),
        out=out.data_ptr(),
        out_pitch=out.stride(0),
        workspace=workspace.data_ptr(),
        **bias_fields(p.bias, bias_scale),
        row_scale=address(row_scale),
        zero_tail=p.fresh and not p.tail_unspecified,
        **second_fields(p.second),
    )
    if not p.fresh:
        torch.autograd.graph.increment_version(out)
