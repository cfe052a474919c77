"""Products of e4m3 operands with scales of blocks of 128, or of whole rows, by our own kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...formats.copies import BLOCK, ceil_blocks
from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream, workspace_bytes
from ..problems.gemm import first
from ..problems.quantized import Multiplying, ScaledGemm, ScaledWgrad
from .gemm import MAX_GROUPS, MAX_ROWS, layout_refusal, vectors_refusal
from .operands import addressing, as_float32, bias_fields


def refusal(problem: Multiplying) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    if (why := _operands_refusal(problem)) is not None:
        return why
    why = _gemm_refusal(problem) if isinstance(problem, ScaledGemm) else _wgrad_refusal(problem)
    return why or layout_refusal(out=problem.out)


def run(problem: Multiplying) -> None:
    """Computes ``problem.out``."""
    if isinstance(problem, ScaledGemm):
        launch_gemm(problem)
    else:
        launch_wgrad(problem)


def launch_gemm(p: ScaledGemm) -> None:
    """One launch on the current stream."""
    bias_scale, row_scale, alphas = map(as_float32, (p.bias_scale, p.row_scale, p.alpha))
    workspace = new_workspace(p)
    launch = compiled().row_scaled_gemm if scales_whole_rows(p) else compiled().scaled_gemm
    launch(
        **row_fields(p, workspace),
        **bias_fields(p.bias, bias_scale),
        row_scale=address(row_scale),
        alphas=address(alphas),
        zero_tail=p.fresh,
    )
    if not p.fresh:
        torch.autograd.graph.increment_version(p.out)


def scales_whole_rows(p: ScaledGemm) -> bool:
    """Whether both operands have one scale for each row, and not for blocks."""
    assert p.a.scales is not None
    return p.a.scales.dim() == 1


def row_fields(p: ScaledGemm, workspace: Tensor) -> dict[str, Any]:
    """The fields of a product of rows, in their order, up to those that are optional."""
    return {
        **_operand_fields(p, (p.weight, p.weight_scales), (p.out.data_ptr(), p.out.stride(0)), workspace),
        "k": p.mnk[2],
        "a_pitch": p.a.data.stride(0),
        "b_pitch": p.weight.stride(1),
        "b_group": p.weight.stride(0),
        **_scale_fields(p),
    }


def _scale_fields(p: ScaledGemm) -> dict[str, Any]:
    """The fields for the scales of weights, and others that depend on their kind."""
    strides = p.weight_scales.stride()
    fields = {"b_scales_group": strides[0], "b_scales_row": strides[1]}
    if scales_whole_rows(p):
        return {**fields, "fast": p.fast_accumulation}
    return {**fields, "b_scales_column": strides[2], "halves": p.halves == 2}


def launch_wgrad(p: ScaledWgrad, variant: int = -1) -> None:
    """One launch on the current stream.

    Args:
        variant: a tile variant instead of the cost model's, for tests and tuning.
    """
    m = p.mnk[0]
    (out, pitch, group), out_addresses = addressing(p.out)
    workspace = new_workspace(p)
    compiled().scaled_wgrad(
        **_operand_fields(p, p.b[:2], (out, pitch), workspace, variant),
        m=m,
        out_group=group,
        out_addresses=out_addresses,
        accumulate=p.accumulate,
    )
    if not p.fresh:
        torch.autograd.graph.increment_version(p.out)


def _operand_fields(
    p: Multiplying, b: tuple[Tensor, Tensor | None], out: tuple[int, int], workspace: Tensor, variant: int = -1
) -> dict[str, Any]:
    """The fields that both launches have, in their order: of the tokens, ``b`` with its scales, and ``out``."""
    device, (b_data, b_scales) = p.a.data.get_device(), b
    assert p.a.scales is not None
    assert b_scales is not None
    return {
        "device": device,
        "stream": stream(device),
        "groups": p.groups,
        "tokens": p.rows,
        "n": p.mnk[1],
        "a": p.a.data.data_ptr(),
        "a_scales": p.a.scales.data_ptr(),
        "b": b_data.data_ptr(),
        "b_scales": b_scales.data_ptr(),
        "sizes": p.split_sizes.data_ptr(),
        "int64_sizes": p.split_sizes.dtype == torch.int64,
        "output": TYPE_CODES[first(p.out).dtype],
        "out": out[0],
        "out_pitch": out[1],
        "workspace": workspace.data_ptr(),
        "variant": variant,
    }


def new_workspace(p: Multiplying) -> Tensor:
    """The workspace of a launch."""
    return p.a.data.new_empty(workspace_bytes(p.groups), dtype=torch.uint8)


def _operands_refusal(p: Multiplying) -> str | None:
    """The reason against the operands and sizes of either kind of product, or None."""
    data, sizes = p.a.data, p.split_sizes
    if (why := hardware_refusal(data)) is not None:
        return why
    other = p.weight if isinstance(p, ScaledGemm) else p.b.data
    if data.dtype != torch.float8_e4m3fn or other.dtype != torch.float8_e4m3fn:
        return f"needs float8_e4m3fn operands, got {data.dtype} and {other.dtype}"
    if first(p.out).dtype not in TYPE_CODES:
        return f"gives bfloat16, float16 or float32, not {first(p.out).dtype}"
    if not 1 <= p.groups <= MAX_GROUPS:
        return f"takes 1 to {MAX_GROUPS} groups, got {p.groups}"
    if p.rows > MAX_ROWS:
        return f"takes at most {MAX_ROWS} rows, got {p.rows}"
    if sizes.dtype not in (torch.int32, torch.int64) or not sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    return None


def _gemm_refusal(p: ScaledGemm) -> str | None:
    _, n, k = p.mnk
    if k % 16 or n % 8:
        return f"needs a depth that is a multiple of 16 and columns of 8, got {k} and {n}"
    if n // p.halves % 8:
        return f"needs halves of the columns that are multiples of 8, got {n // 2}"
    if (why := _scales_refusal(p)) is not None:
        return why
    if p.bias is not None and first(p.bias).dtype not in TYPE_CODES:
        return f"needs a bias of 16 or 32 bits, got {first(p.bias).dtype}"
    factors = {"bias": p.bias, "bias_scale": p.bias_scale, "row_scale": p.row_scale, "alpha": p.alpha}
    why = layout_refusal(**{"a": p.a.data, "the weight": p.weight})
    return why or vectors_refusal(p.a.data.device, **factors)


def _scales_refusal(p: ScaledGemm) -> str | None:
    """Scales must be of blocks, or of whole rows, of both operands."""
    assert p.a.scales is not None
    tokens, n, k = p.mnk
    of_rows, of_weights = [tokens], [p.groups, n]
    if not scales_whole_rows(p):
        of_rows = [ceil_blocks(k), -(-tokens // 4) * 4]
        of_weights = [p.groups, p.halves * ceil_blocks(n // p.halves), of_rows[0]]
    if list(p.a.scales.shape) != of_rows or not p.a.scales.is_contiguous():
        return f"needs contiguous scales of rows of shape {of_rows}, got {list(p.a.scales.shape)}"
    if list(p.weight_scales.shape) != of_weights:
        return f"needs scales of weights of shape {of_weights}, got {list(p.weight_scales.shape)}"
    if any(scales.dtype != torch.float32 for scales in (p.a.scales, p.weight_scales)):
        return "needs float32 scales"
    return None


def _wgrad_refusal(p: ScaledWgrad) -> str | None:
    m, n, _ = p.mnk
    if m % 8 or n % 8:
        return f"needs features that are multiples of 8, got {m} and {n}"
    if p.accumulate and first(p.out).dtype != torch.float32:
        return f"accumulates in float32, not in {first(p.out).dtype}"
    for name, (data, scales, *_) in (("a", p.a), ("b", p.b)):
        are_dense = scales is not None and data.is_contiguous() and scales.is_contiguous()
        if scales is None or not are_dense or scales.dtype != torch.float32:
            return f"needs contiguous blocks of {name} and float32 scales"
        if data.shape[0] < p.rows // BLOCK + p.groups:
            return f"needs {p.rows // BLOCK + p.groups} blocks of {name}, got {data.shape[0]}"
    return None
