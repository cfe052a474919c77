"""Products of e4m3 operands that end in an activation, whose rows are quantised before they reach memory."""

from __future__ import annotations

import torch

from ...formats.copies import BLOCK
from ..extension import TYPE_CODES, address, compiled
from ..problems.quantized import ActivatedScaledGemm
from . import quantized_functions, scaled_gemm
from .epilogue import tile_refusal
from .operands import as_float32, bias_fields
from .rows import scale_arguments

NAME = "hopper (e4m3, activation in the epilogue)"


def refusal(problem: ActivatedScaledGemm) -> str | None:
    """Why the activation needs a kernel of its own behind a product that runs here; None: it does not."""
    product, spec, scales, preact = problem.product, problem.activation, problem.scales, problem.product.out
    features = spec.out_features(product.mnk[1])
    if preact.dtype not in (torch.bfloat16, torch.float16) or not preact.is_contiguous():
        return f"quantises dense rows of bfloat16 or float16, not {preact.dtype} with strides {list(preact.stride())}"
    if product.row_scale is not None or product.alpha is not None:
        return "takes no factor but the scales of the bias"
    if scales is not None and not (scales.dtype in TYPE_CODES and scales.is_contiguous()):
        return f"needs dense scales of 16 or 32 bits, got {scales.dtype} with strides {list(scales.stride())}"
    if features % 16:
        return f"needs hidden features that are multiples of 16, got {features}"
    return (_block_refusal(spec.block, features) if spec.gated else None) or quantized_functions.refusal(problem)


def _block_refusal(block: int | None, features: int) -> str | None:
    """The reason against the block size of gate and up (None: halves), or None."""
    if block is None or block == features:
        return None if features % BLOCK == 0 else f"needs halves that are multiples of {BLOCK} columns, got {features}"
    return tile_refusal(block, features)


def run(problem: ActivatedScaledGemm) -> None:
    """Fills ``rows``, and ``product.out`` unless that has no rows."""
    product, rows = problem.product, problem.rows
    scales, scales_type = scale_arguments(problem.scales)
    bias_scale, workspace = as_float32(product.bias_scale), scaled_gemm.new_workspace(product)
    compiled().scaled_activation(
        **quantized_functions.fields(problem),
        **scaled_gemm.row_fields(product, workspace),
        power_of_two=problem.power_of_two,
        rows=rows.data.data_ptr(),
        row_scales=address(rows.scales),
        **bias_fields(product.bias, bias_scale),
        scales=scales,
        scales_type=scales_type,
        zero_tail=product.out.shape[0] > 0,
    )
